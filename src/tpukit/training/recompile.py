"""The training step, compiled once before the first batch.

A step that is compiled ahead of time never recompiles unnoticed. When an argument changes its shape
or dtype, the change is named, and the batch is refused or, if allowed, the step is compiled again.
The compiler options depend on the platform.
"""

import logging
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import jax

from ..annotations import AnyMesh, PyTree
from ..errors import TPUValidationError
from ..hardware.target import on_one_gpu
from ..runtime.files import cache_folder, private_folder, refuse_shared
from ..shown import Facts
from ..step.parts import TrainState
from ..step.workload import Workload
from .debugging import is_debugging, only_nans_inside, refuse_infs

logger = logging.getLogger(__name__)
CACHE_HIT = "/jax/compilation_cache/cache_hits"
# Measured on an H200 with a 1.14 B-parameter transformer (`benchmarks/h200.py train`): XLA's Triton
# matmuls cost 1 % where cuBLAS could do all of them. Slicing weights out of their stack inside a
# matmul keeps XLA from trying cuBLAS's algorithms for it, which costs 2 ms of a 375 ms step.
GPU_OPTIONS = {
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_enable_dynamic_slice_fusion": False,
}
# Several devices of one CPU share its threads. XLA starts independent collectives in any order, so
# one device can wait in the first for a thread that another one occupies in the second; after 40 s
# XLA aborts the process. With one thread per device they run in the program's order.
SHARED_CPU_OPTIONS = {"xla_cpu_multi_thread_eigen": False}


@dataclass(frozen=True, kw_only=True)
class ArgumentChange(Facts):
    """An argument whose shape or dtype differs from the one a function was compiled for."""

    path: str
    old: str | None
    new: str | None

    def __str__(self) -> str:
        if self.old is None:
            return f"{self.path} is new ({self.new})"
        if self.new is None:
            return f"{self.path} ({self.old}) is gone"
        return f"{self.path} changed from {self.old} to {self.new}"


def find_changes(old: PyTree, new: PyTree, *, name: str = "") -> list[ArgumentChange]:
    """Return every leaf whose shape or dtype differs between two trees of arrays or shapes.

    Example:
        >>> [str(change) for change in find_changes({"x": old}, {"x": new}, name="batch")]
        ["batch['x'] changed from int32[8,64] to int32[8,32]"]
    """
    before, after = _leaves(old), _leaves(new)
    return [
        ArgumentChange(path=name + path, old=before.get(path), new=after.get(path))
        for path in (*before, *(path for path in after if path not in before))
        if before.get(path) != after.get(path)
    ]


def _leaves(tree: PyTree) -> dict[str, str]:
    return {
        jax.tree_util.keystr(path): _describe(leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def _describe(leaf: jax.Array) -> str:
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def options_here(planned: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the compiler options for this backend; a job's own are for TPUs only."""
    if jax.default_backend() == "tpu":
        return dict(planned) or None
    return compiler_options()


class StepProgram:
    """A workload's training step on a mesh, compiled ahead of time.

    In debugging mode (`config.enable_debugging_mode()`) nothing is compiled: the step runs
    operation by operation, so that the operation that makes a NaN raises.

    Attributes:
        compile_s: Seconds spent tracing and compiling so far (measured).
        from_cache: Whether the last compile was found in jax's persistent cache.
        changes: Every argument change that led to another compile.
    """

    def __init__(
        self,
        work: Workload,
        mesh: AnyMesh,
        *,
        on_change: str = "refuse",
        options: Mapping[str, Any] | None = None,
        tune: Callable[[str], Mapping[str, Any]] | None = None,
    ) -> None:
        """Prepare a step; `compile` compiles it.

        Args:
            work: The workload to train.
            mesh: The mesh to train it on.
            on_change: "refuse" or "allow" batches of another shape.
            options: The job's options for the TPU compiler.
            tune: Maps the compiled step's text to compiler options that make it faster.
        """
        self._work, self._mesh, self._on_change = work, mesh, on_change
        self._options, self._tune = options_here(options or {}), tune
        self._compiled: dict[tuple[Any, ...], Callable[..., Any]] = {}
        self._first = _signature(work.batch_shapes())
        self.compile_s = 0.0
        self.from_cache = False
        self.changes: list[ArgumentChange] = []

    @property
    def ahead(self) -> int:
        """How many more steps may be dispatched before a step's metrics are read."""
        return 0 if is_debugging() else 1

    def compile(self) -> None:
        """Compile the step for the workload's batch shapes."""
        self._program(self._first)

    def __call__(
        self, state: TrainState, batch: Mapping[str, jax.Array]
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        """Take one step; the state's buffers are reused for the new state.

        Raises:
            TPUValidationError: The batch is not what the step was compiled for.
        """
        program = self._program(_signature(batch))
        if not is_debugging():
            return program(state, batch)
        with only_nans_inside():
            after, metrics = program(state, batch)
        refuse_infs(metrics, name="the step's")
        refuse_infs(after.params, name="the new parameter")
        return after, metrics

    def check(self, batch: Mapping[str, Any]) -> None:
        """Raise `TPUValidationError` for a batch of another shape, unless that is allowed."""
        signature = _signature(batch)
        if signature in self._compiled or signature == self._first:
            return
        expected = self._work.batch_shapes()
        changed = find_changes(expected, batch, name="batch")
        words = "; ".join(map(str, changed))
        if self._on_change == "refuse":
            raise TPUValidationError(
                f"The step is compiled once, but {words}. Give every batch the same shape (drop "
                "or pad the last one), or set on_recompile='allow' to compile again."
            )
        self.changes.extend(changed)
        logger.warning("Compiling the step again: %s", words)

    def _program(self, signature: tuple[Any, ...]) -> Callable[..., Any]:
        compiled = self._compiled.get(signature)
        if compiled is not None:
            return compiled
        shapes = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape, dtype in signature}
        work = self._work if signature == self._first else self._work.replace(batch=shapes)
        step = work.jit_train_step(self._mesh)
        if not is_debugging():
            with self._compiling():
                lowered = step.lower(*work.abstract_args(self._mesh))
                step = lowered.compile(compiler_options=self._options)
            tuned = self._tune(step.as_text() or "") if self._tune is not None else {}
            if tuned:
                with self._compiling():
                    step = lowered.compile(compiler_options={**(self._options or {}), **tuned})
        self._compiled[signature] = step
        return step

    @contextmanager
    def _compiling(self) -> Generator[None]:
        began = time.perf_counter()
        with counting_cache_hits() as hits, keeping_own_programs():
            yield
        self.compile_s += time.perf_counter() - began
        self.from_cache = bool(hits)


def _signature(batch: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(
        (name, tuple(value.shape), jax.dtypes.canonicalize_dtype(value.dtype))
        for name, value in sorted(batch.items())
    )


@contextmanager
def counting_cache_hits() -> Generator[list[str]]:
    """Collect the programs that jax finds in its disk cache inside the block."""
    hits: list[str] = []

    def note(event: str, **_: Any) -> None:
        if event == CACHE_HIT:
            hits.append(event)

    jax.monitoring.register_event_listener(note)
    try:
        yield hits
    finally:
        jax.monitoring.unregister_event_listener(note)


@contextmanager
def keeping_own_programs() -> Generator[None]:
    """Let every process write what it compiles in the block to jax's disk cache, on CPUs.

    jax lets process 0 alone write: on other platforms all processes have the same cache key, and
    some file systems cannot cope with many writers of one file. On CPUs each process has its own
    key, so all but the first would compile again at every restart.
    """
    if jax.default_backend() != "cpu" or jax.process_count() == 1:
        yield
        return
    # Not public; if it is missing, the others compile again, and nothing else changes.
    state: Any = getattr(import_module("jax._src.distributed"), "global_state", None)
    rank = getattr(state, "process_id", 0)
    if not rank:
        yield
        return
    state.process_id = 0
    try:
        yield
    finally:
        state.process_id = rank


def enable_compilation_cache() -> Path:
    """Keep compiled programs on disk, so that a restart does not compile again.

    Returns:
        The cache folder; one that is set already (`JAX_COMPILATION_CACHE_DIR`) stays.
    """
    from jax.experimental.compilation_cache import compilation_cache

    chosen: str | None = jax.config.jax_compilation_cache_dir  # pyright: ignore[reportAttributeAccessIssue]  made at run time
    if chosen is None:
        chosen = str(private_folder(cache_folder("xla")))
        jax.config.update("jax_compilation_cache_dir", chosen)
        # jax decides at its first compile whether there is a cache, and remembers the answer.
        compilation_cache.reset_cache()
    if "://" not in chosen:
        refuse_shared(Path(chosen))
    return Path(chosen)


def compiler_options() -> dict[str, Any] | None:
    """Return the options that compile a step best on this backend; None for the defaults."""
    if on_one_gpu():
        return dict(GPU_OPTIONS)
    if jax.default_backend() == "cpu" and jax.local_device_count() > 1:
        return dict(SHARED_CPU_OPTIONS)
    return None

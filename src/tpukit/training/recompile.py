"""The compiled step: compiled once before the first batch, and what a change of shape would cost.

A step compiled ahead of time never recompiles behind anyone's back. When an argument changes its
shape or type, the change is named, and the step is refused or, if allowed, compiled again. What the
compiler is told depends on the platform.
"""

import logging
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from ..annotations import AnyMesh, PyTree
from ..errors import TPUValidationError
from ..hardware.target import on_one_gpu
from ..runtime.files import cache_folder, private_folder, refuse_shared
from ..step.workload import Workload
from .debugging import is_debugging, only_nans_inside, refuse_infs
from .own_programs import keeping_own_programs

logger = logging.getLogger(__name__)
CACHE_HIT = "/jax/compilation_cache/cache_hits"
# Measured on an H200 with a 1.14 B-parameter transformer (`benchmarks/train_h200.py`): XLA's Triton
# products cost 1 % where cuBLAS has all of them; and cutting weights out of their stack inside a
# product keeps XLA from trying cuBLAS's algorithms for it, 2 ms of a step of 375.
GPU_OPTIONS = {
    "xla_gpu_enable_triton_gemm": False,
    "xla_gpu_enable_dynamic_slice_fusion": False,
}
# Several devices of one CPU share its threads. XLA starts collectives that do not depend on each
# other in any order, so one device can wait in the first for a thread that another holds in the
# second; after 40 s the process is aborted. With one thread a device keeps the program's order.
SHARED_CPU_OPTIONS = {"xla_cpu_multi_thread_eigen": False}


@dataclass(frozen=True, kw_only=True)
class ArgumentChange:
    """One argument of a compiled function that is no longer what it was compiled for."""

    path: str
    old: str | None
    new: str | None

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"path": self.path, "old": self.old, "new": self.new}

    def __str__(self) -> str:
        if self.old is None:
            return f"{self.path} is new ({self.new})"
        if self.new is None:
            return f"{self.path} ({self.old}) is gone"
        return f"{self.path} changed from {self.old} to {self.new}"


def find_changes(old: PyTree, new: PyTree, *, name: str = "") -> list[ArgumentChange]:
    """Every leaf whose shape or dtype differs between two trees of arrays or shapes.

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


def _leaves(tree: Any) -> dict[str, str]:
    return {
        jax.tree_util.keystr(path): _describe(leaf)
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


def _describe(leaf: Any) -> str:
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def options_here(planned: Mapping[str, Any]) -> dict[str, Any] | None:
    """Compiler options for what is here: a plan's are a TPU's, and no other backend knows them."""
    if jax.default_backend() == "tpu":
        return dict(planned) or None
    return compiler_options()


class StepProgram:
    """A workload's training step on a mesh, compiled ahead of time.

    In debugging mode (`config.enable_debugging_mode()`) nothing is compiled: the step runs
    operation by operation, so that the one that makes a NaN is the one that raises.

    Attributes:
        compile_s: Seconds spent tracing and compiling so far (measured).
        from_cache: Whether the last compile was found in jax's persistent cache.
        changes: Every change that led to another compile.
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
        """Compile nothing yet.

        Args:
            work: What is trained.
            mesh: What it is trained on.
            on_change: "refuse" or "allow" batches of another shape.
            options: A plan's, for the compiler of a TPU.
            tune: From the compiled step's text to options that make it faster, if any.
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
        """Steps that may be on their way when the last one's metrics are read."""
        return 0 if is_debugging() else 1

    def compile(self) -> None:
        """Compile for the workload's own batch."""
        self._program(self._first)

    def __call__(self, state: Any, batch: Mapping[str, jax.Array]) -> tuple[Any, dict[str, Any]]:
        """One step; the state's buffers are reused for the new state.

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
        """Refuse a batch of another shape, where that is not allowed."""
        signature = _signature(batch)
        if signature in self._compiled or signature == self._first:
            return
        expected = self._work.batch_shapes()
        changed = find_changes(expected, batch, name="batch")
        words = "; ".join(map(str, changed))
        if self._on_change == "refuse":
            raise TPUValidationError(
                f"The step was compiled once and {words}. Give every batch the same shape (drop "
                "or pad the last one), or set on_recompile='allow' and pay for another compile."
            )
        self.changes.extend(changed)
        logger.warning("Compiling the step again: %s", words)

    def _program(self, signature: tuple[Any, ...]) -> Callable[..., Any]:
        found = self._compiled.get(signature)
        if found is not None:
            return found
        shapes = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape, dtype in signature}
        work = self._work if signature == self._first else self._work.replace(batch=shapes)
        step = work.jit_train_step(self._mesh)
        if not is_debugging():
            with self._compiling():
                lowered = step.lower(*work.abstract_args(self._mesh))
                step = lowered.compile(compiler_options=self._options)
            found = self._tune(step.as_text() or "") if self._tune is not None else {}
            if found:
                with self._compiling():
                    step = lowered.compile(compiler_options={**(self._options or {}), **found})
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
    """Collect, while it is open, each program that jax finds in its cache on disk."""
    hits: list[str] = []

    def note(event: str, **_: Any) -> None:
        if event == CACHE_HIT:
            hits.append(event)

    jax.monitoring.register_event_listener(note)
    try:
        yield hits
    finally:
        jax.monitoring.unregister_event_listener(note)


def enable_compilation_cache() -> Path:
    """Keep compiled programs on disk, so that a restart does not compile again.

    A folder that was set already (`JAX_COMPILATION_CACHE_DIR`) stays.
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
    """Options for a step's compile on what is here; None where the usual ones are best."""
    if on_one_gpu():
        return dict(GPU_OPTIONS)
    if jax.default_backend() == "cpu" and jax.local_device_count() > 1:
        return dict(SHARED_CPU_OPTIONS)
    return None

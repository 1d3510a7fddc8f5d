"""`XLACompiler`: compiled forwards of PyTorch modules, kept, and explained when compiled again."""

import logging
import threading
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from ...checker.check import check
from ...checker.result import CheckResult
from ...errors import XLACompilationError
from ...hardware import Slice
from ...job.compiler_flags import compiler_options
from ...models.adapters.torch_module.environment import environment
from ...training.recompile import ArgumentChange, enable_compilation_cache
from ..annotations import TorchInputs
from ..config import tpu_settings
from ..lru import Departure, LRUCache
from ..validation import check_is_module, report
from .building import ForwardProgram, build_program, seed_shape
from .call import ModuleCall, find_changes
from .compiled_model import CompiledModel
from .forward import ForwardFunction
from .offline import TorchLoss, job_for
from .structure import module_structure

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)
MAX_AGE_S = 24 * 3600.0
"""How long a compiled program is kept in memory by default."""


@dataclass(frozen=True)
class Recompilation:
    """A program that was compiled because a call differed from those before it."""

    model: str
    changes: tuple[ArgumentChange, ...]
    compile_s: float

    def to_dict(self) -> dict[str, Any]:
        """Plain data, with the change in words."""
        return {
            "model": self.model,
            "reason": explain(self.changes),
            "changes": [one.to_dict() for one in self.changes],
            "compile_s": self.compile_s,
        }


class XLACompiler:
    """Compiles modules for the device that is here, and checks them for slices that are not.

    Compiled programs are kept by the structure of a module and the kind of call, not by weights:
    a second module of the same structure compiles nothing. They are also kept on disk, by jax,
    where compiling took a second or more.

    Args:
        config: `KernelPyTorchConfig`, its `hardware.tpu`, or a `TPUConfig`; None for defaults.
            `cache_max_size` bounds the programs kept (None: 100), `compilation_timeout_seconds`
            each compile, `enable_strict_validation` makes an error of what is otherwise a warning.
        max_age_s: How long a program is kept in memory; None: until it is evicted.

    Example:
        >>> compiler = XLACompiler(KernelPyTorchConfig())
        >>> compiled = compiler.compile_model(model, torch.randn(8, 512))
        >>> compiled(torch.randn(8, 512)).shape
        torch.Size([8, 10])
    """

    def __init__(self, config: object = None, *, max_age_s: float | None = MAX_AGE_S) -> None:
        self.settings = tpu_settings(config)
        self._cache: LRUCache[Hashable, ForwardProgram] = LRUCache(
            lambda: self.settings.cache_max_size, max_age_s=max_age_s, on_departure=_log_departure
        )
        self._counts: Counter[str] = Counter()
        self._compile_s = 0.0
        self._recompilations: list[Recompilation] = []
        self._lock = threading.Lock()

    def compile_model(
        self,
        model: "torch.nn.Module",
        sample_inputs: TorchInputs | None = None,
        use_cache: bool = True,
    ) -> CompiledModel:
        """Compile a module's forward.

        Args:
            model: An `nn.Module`, in the mode it is to run in.
            sample_inputs: A tensor, a tuple of arguments, or a dict of them by name; None compiles
                at the first call.
            use_cache: Whether a program compiled before will do, and this one is kept.

        Raises:
            TPUValidationError: What is given is no module, or cannot be called with the inputs.
            TPUModelError: The module cannot be one program.
            XLACompilationError: The compiler refused it, or the time was up.
        """
        check_is_module(model, what="compile_model")
        environment()  # what is missing for torch is said here, not in the first call
        structure = module_structure(model)

        def find_program(compiled: CompiledModel, call: ModuleCall) -> ForwardProgram:
            options = self._options()

            def build() -> ForwardProgram:
                return self._build(compiled, call, options)

            if not use_cache:
                return build()
            key = (structure, call.kind, jax.default_backend(), tuple(options.items()))
            return self._cache.get_or_make(key, build)

        compiled = CompiledModel(model, find_program)
        if sample_inputs is not None:
            compiled.prepare(sample_inputs)
        return compiled

    def compile_for(
        self,
        on: Slice | str,
        model: "torch.nn.Module",
        sample_inputs: TorchInputs,
        *,
        loss: TorchLoss | None = None,
        memory_only: bool = False,
        fix: bool = False,
        use_cache: bool = True,
        **changes: Any,
    ) -> CheckResult:
        """Check with the real TPU compiler whether training a module fits on a slice.

        This is `tpukit check`: a whole training step, laid out over the slice, compiled offline.
        The configuration's limits hold: `memory_fraction`, `memory_per_chip`, `v6e_memory_gb`,
        `v7_memory_gb`, `compilation_timeout_seconds`.

        Args:
            on: The slice, e.g. "v6e-8"; none needs to be here.
            model: An `nn.Module`; one on torch's meta device takes no memory.
            sample_inputs: The batch of one step over all chips, as for `compile_model`; a dict may
                hold tensors for the loss alone, such as "targets".
            loss: (outputs, batch) -> a scalar, in torch. By default the loss that the module
                itself gives, or the cross-entropy of its logits with "targets".
            memory_only: Whether the verdict on memory is enough.
            fix: Whether to look for what would make it fit.
            use_cache: Whether an earlier answer will do.
            **changes: Keys of the job: mesh, remat, batch_size, train, …

        Raises:
            TPUModelError: Nothing trains with these settings.
            XLACompilationError: The compiler refused the step, or ran out of time.
        """
        check_is_module(model, what="compile_for")
        environment()
        job = job_for(self.settings, on, model, sample_inputs, loss=loss, changes=changes)
        result = check(job, memory_only=memory_only, fix=fix, use_cache=use_cache)
        facts = {"model": type(model).__name__, "slice": job.on, "fits": result.fits}
        logger.info("checked", extra=facts)
        return result

    def get_compilation_stats(self) -> dict[str, Any]:
        """Counts since this compiler was made.

        `compilation_cache` has hits, misses, size, max_size, evictions, expirations, hit_rate.
        `compiled` counts programs by where they were compiled, `from_disk` those found on disk,
        `traces` how often Python ran a forward, and `recompilations` says what changed each time.
        """
        with self._lock:
            counts = self._counts
            return {
                "compilation_cache": self._cache.stats.to_dict(),
                "compilations": sum(counts[where] for where in ("here", "child", "thread")),
                "compiled": {where: counts[where] for where in ("here", "child", "thread")},
                "from_disk": counts["from_disk"],
                "traces": counts["traces"],
                "compile_seconds": self._compile_s,
                "recompilations": [one.to_dict() for one in self._recompilations],
                "persistent_cache": str(enable_compilation_cache()),
            }

    def clear_cache(self) -> None:
        """Drop the programs kept in memory; models made from them keep theirs, counts stay."""
        logger.info("cache cleared", extra={"entries": len(self._cache)})
        self._cache.clear()

    def _options(self) -> dict[str, Any]:
        """Return what the configuration asks of a TPU's compiler; others know none of it."""
        if jax.default_backend() != "tpu":
            return {}
        chip = self.settings.chip
        return compiler_options(self.settings, generation=None if chip is None else chip.name)

    def _build(
        self, compiled: CompiledModel, call: ModuleCall, options: dict[str, Any]
    ) -> ForwardProgram:
        changes = self._changes_since(compiled, call)
        self._warn_of_narrowing(compiled, call)
        function = ForwardFunction(compiled.module, compiled.reader, call.kind)
        arguments = (*compiled.state.arrays(), seed_shape(), call.kind.shapes)
        timeout_s = self.settings.compilation_timeout_seconds
        try:
            program = build_program(
                function, arguments, name=compiled.name, timeout_s=timeout_s, options=options
            )
        except XLACompilationError as error:
            logger.error("compile failed", extra={"model": compiled.name, "error": str(error)})
            raise
        finally:
            with self._lock:
                self._counts["traces"] += function.traces
        with self._lock:
            self._counts[program.where] += 1
            self._counts["from_disk"] += program.from_disk
            self._compile_s += program.compile_s
            if changes:
                self._recompilations.append(
                    Recompilation(compiled.name, changes, program.compile_s)
                )
        facts = {
            "operations": program.operations,
            "seconds": round(program.compile_s, 3),
            "where": program.where,
            "from_disk": program.from_disk,
        }
        logger.info("compiled", extra={"model": compiled.name, **facts})
        return program

    def _changes_since(
        self, compiled: CompiledModel, call: ModuleCall
    ) -> tuple[ArgumentChange, ...]:
        """Say what changed since the nearest call in the same mode; nothing of the first."""
        earlier = [kind for kind in compiled.kinds if kind.training == call.kind.training]
        if not earlier:
            return ()
        found = [tuple(find_changes(kind, call.kind)) for kind in earlier]
        changes = min(reversed(found), key=len)
        self._warn(
            f"{compiled.name} is compiled again because {explain(changes)}; give every call the "
            "same shapes (drop or pad the last batch)."
        )
        return changes

    def _warn_of_narrowing(self, compiled: CompiledModel, call: ModuleCall) -> None:
        wide = [*call.narrowed(), *compiled.state.narrowed]
        if wide:
            self._warn(
                f"{compiled.name} computes in 32 bits, and {', '.join(wide[:3])} has 64; cast it "
                "with .float() where that is meant."
            )

    def _warn(self, note: str) -> None:
        """Warn, or under strict validation refuse."""
        report([note], strict=self.settings.enable_strict_validation)


def explain(changes: tuple[ArgumentChange, ...]) -> str:
    """Changes in words; what no argument shows is in how they nest."""
    return "; ".join(map(str, changes)) or "the arguments nest otherwise"


def _log_departure(key: Hashable, program: ForwardProgram, how: Departure) -> None:
    logger.info(f"program {how}", extra={"operations": program.operations})

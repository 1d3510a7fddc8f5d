"""`XLACompiler`: compiles and caches forwards of PyTorch modules, and explains recompiles."""

import dataclasses
import enum
import logging
import threading
import types
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from ...checker.check import check
from ...checker.result import CheckResult
from ...errors import XLACompilationError
from ...hardware import Slice
from ...job.compiler_flags import compiler_options
from ...models.adapters.torch_module.environment import environment
from ...models.adapters.torch_module.state import ModuleState
from ...plain_data import JsonObject
from ...training.recompile import ArgumentChange, enable_compilation_cache
from ..batches import TorchInputs
from ..config import tpu_settings
from ..lru import Departure, LRUCache
from ..validation import check_is_module, report
from .building import ForwardProgram, build_program, seed_shape
from .call import ForwardFunction, ModuleCall, find_changes
from .compiled_model import CompiledModel
from .offline import TorchLoss, job_for

if TYPE_CHECKING:
    import torch

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
# Values that are equal only to themselves and have no other content.
_ITSELF = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType)


class Same:
    """A key by identity; it keeps the object alive, so that its id is not reused."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


def module_structure(module: "torch.nn.Module") -> Hashable:
    """Return a key that is equal for modules that trace to the same program.

    It contains the tree of classes with their settings, and names, shapes, dtypes and ties of all
    tensors, but not their values, which are arguments of the program. If a module contains an
    object of unknown content, such as a tensor in a list, its key equals no other.
    """
    state = ModuleState.of(module)
    tensors = tuple(
        (name, tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad)
        for name, tensor in (*state.trained.items(), *state.carried.items())
    )
    parts = tuple((name, type(part), _settings(part)) for name, part in module.named_modules())
    return parts, tensors, tuple(state.aliases.items())


def _settings(module: "torch.nn.Module") -> Hashable:
    """Return a module's attributes beside tensors and submodules, hooks included."""
    import torch

    # The training mode is part of each call.
    skipped = ("_parameters", "_buffers", "_modules", "training")
    return tuple(
        (name, _described(value))
        for name, value in vars(module).items()
        if name not in skipped and not isinstance(value, torch.Tensor)
    )


def _described(value: Any) -> Hashable:
    import torch

    if isinstance(value, _PLAIN):
        return type(value), value  # 1, 1.0 and True are equal but make different programs
    if isinstance(value, (*_ITSELF, enum.Enum, torch.dtype, torch.device)):
        return value
    if isinstance(value, tuple | list):
        return type(value), tuple(_described(item) for item in value)
    if isinstance(value, Mapping):
        return type(value), tuple((_described(k), _described(v)) for k, v in value.items())
    if isinstance(value, set | frozenset):
        return type(value), frozenset(_described(item) for item in value)
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return type(value), _described(fields)
    # Hugging Face configurations convert themselves to plain data.
    if callable(getattr(value, "to_dict", None)):
        return type(value), _described(value.to_dict())
    return Same(value)


if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)
MAX_AGE_S = 24 * 3600.0
"""Default time that a compiled program stays in memory."""


@dataclass(frozen=True)
class Recompilation:
    """A compile that was caused by a call that differed from earlier ones."""

    model: str
    changes: tuple[ArgumentChange, ...]
    compile_s: float

    def to_dict(self) -> JsonObject:
        """Return plain data, with the reason as text."""
        return {
            "model": self.model,
            "reason": explain(self.changes),
            "changes": [change.to_dict() for change in self.changes],
            "compile_s": self.compile_s,
        }


class XLACompiler:
    """Compiles modules for the device here, and checks them for any slice.

    Compiled programs are cached by module structure and kind of call, not by weights, so a second
    module of the same structure needs no compile. jax also caches programs on disk that took a
    second or more to compile.

    Args:
        config: `KernelPyTorchConfig`, its `hardware.tpu`, or a `TPUConfig`; None for defaults.
            `cache_max_size` limits the cached programs (None: 100), `compilation_timeout_seconds`
            each compile; `enable_strict_validation` turns warnings into errors.
        max_age_s: How long a program stays in memory; None: until it is evicted.

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
            model: An `nn.Module`, in the mode (training or evaluation) it will run in.
            sample_inputs: A tensor, a tuple of arguments, or a dict by name; None compiles at the
                first call.
            use_cache: Whether to use a cached program, and to cache this one.

        Raises:
            TPUValidationError: It is not a module, or does not accept the inputs.
            TPUModelError: The module cannot become one program.
            XLACompilationError: The compiler refused the program, or took too long.
        """
        check_is_module(model, what="compile_model")
        environment()  # raises here, not in the first call, if a package is missing
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

        This is `tpukit check`: a full training step, sharded over the slice, compiled offline.
        The configuration's limits apply: `memory_fraction`, `memory_per_chip`, `v6e_memory_gb`,
        `v7_memory_gb`, `compilation_timeout_seconds`.

        Args:
            on: The slice, e.g. "v6e-8"; no TPU is needed here.
            model: An `nn.Module`; on torch's meta device it takes no memory.
            sample_inputs: The batch of one step over all chips, as for `compile_model`; a dict may
                have tensors for the loss only, such as "targets".
            loss: (outputs, batch) -> a scalar, in torch. By default the loss that the module
                returns, or the cross-entropy of its logits with "targets".
            memory_only: Check the memory only.
            fix: Search for changes that make the job fit.
            use_cache: Use the cached result of an earlier check.
            **changes: Keys of the job: mesh, remat, batch_size, train, …

        Raises:
            TPUModelError: Nothing trains with these settings.
            XLACompilationError: The compiler refused the step, or took too long.
        """
        check_is_module(model, what="compile_for")
        environment()
        job = job_for(self.settings, on, model, sample_inputs, loss=loss, changes=changes)
        result = check(job, memory_only=memory_only, fix=fix, use_cache=use_cache)
        facts = {"model": type(model).__name__, "slice": job.on, "fits": result.fits}
        logger.info("checked", extra=facts)
        return result

    def get_compilation_stats(self) -> JsonObject:
        """Return counts since this compiler was created.

        `compilation_cache` has hits, misses, size, max_size, evictions, expirations, hit_rate.
        `compiled` counts programs by where they were compiled, `from_disk` programs found on disk,
        `traces` how often Python ran a forward; `recompilations` lists each change.
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
                "recompilations": [
                    recompilation.to_dict() for recompilation in self._recompilations
                ],
                "persistent_cache": str(enable_compilation_cache()),
            }

    def clear_cache(self) -> None:
        """Drop the cached programs; compiled models keep theirs, and counts stay."""
        logger.info("cache cleared", extra={"entries": len(self._cache)})
        self._cache.clear()

    def _options(self) -> JsonObject:
        """Return the configuration's options for the TPU compiler; none on other backends."""
        if jax.default_backend() != "tpu":
            return {}
        chip = self.settings.chip
        return compiler_options(self.settings, generation=None if chip is None else chip.name)

    def _build(
        self, compiled: CompiledModel, call: ModuleCall, options: JsonObject
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
        """Return the changes since the most similar call in the same mode; none for the first."""
        earlier = [kind for kind in compiled.kinds if kind.training == call.kind.training]
        if not earlier:
            return ()
        candidates = [tuple(find_changes(kind, call.kind)) for kind in earlier]
        changes = min(reversed(candidates), key=len)
        self._warn(
            f"{compiled.name} is compiled again because {explain(changes)}; give every call the "
            "same shapes (drop or pad the last batch)."
        )
        return changes

    def _warn_of_narrowing(self, compiled: CompiledModel, call: ModuleCall) -> None:
        wide = [*call.narrowed(), *compiled.state.narrowed]
        if wide:
            self._warn(
                f"{compiled.name} computes in 32 bits, but {', '.join(wide[:3])} has 64; cast it "
                "with .float() to avoid this warning."
            )

    def _warn(self, note: str) -> None:
        """Log a warning, or raise it under strict validation."""
        report([note], strict=self.settings.enable_strict_validation)


def explain(changes: tuple[ArgumentChange, ...]) -> str:
    """Return the changes as text."""
    return "; ".join(map(str, changes)) or "the arguments have another structure"


def _log_departure(key: Hashable, program: ForwardProgram, how: Departure) -> None:
    logger.info(f"program {how}", extra={"operations": program.operations})

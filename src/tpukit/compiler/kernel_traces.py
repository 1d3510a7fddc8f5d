"""Compile each Pallas kernel of a step alone, and time it by its own bundles.

A step is predicted from its schedule, because generating code for a whole step takes minutes. A
kernel's call contains the kernel's program, so the call alone can be compiled to its bundles in
seconds. Compiled alone, a kernel fetches all its arrays from HBM, even small ones that the step
keeps in VMEM.
"""

import contextlib
import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import TPUError, XLACompilationError
from ..hardware import Chip, Slice
from ..hardware.figure import count_text
from ..hardware.slice import list_slices
from ..runtime.progress import Progress, silent
from .aot import compile_many
from .bundles import CallTrace, trace_call
from .cache import CompileCache
from .hlo import Computation, HloModule, Instruction, Shape
from .hlo.module import KERNEL_TARGET
from .program.request import CompileRequest, compiler_versions, make_request

logger = logging.getLogger(__name__)
FORMAT = 3  # raise it when what is kept of a run, or how a program is run, changes
TIMEOUT_S = 300.0
# The call's program, and how much VMEM it may use; the rest is what the schedule adds.
_CONFIG = ("custom_call_config", "scoped_memory_configs")
_WHERE = "_memory_space_colors"
_OVER_A_CACHE = "attend_slots"  # (layer, positions, q, key, value, keys, values)


def one_device_slice(chip: Chip) -> Slice:
    """Return the smallest slice of a generation; a program without shardings uses one device."""
    return list_slices(chip.name)[0]


def kernel_calls(module: HloModule) -> list[tuple[Instruction, Computation]]:
    """Yield every Pallas call of a compiled program, with its computation."""
    return [
        (instruction, computation)
        for computation in module.computations.values()
        for instruction in computation
        if instruction.is_kernel
    ]


@dataclass(frozen=True)
class LoneKernel:
    """One kernel without its step: its program and the shapes of its arrays.

    Attributes:
        config: The program.
        operands: Shapes.
        results: Shapes.
        numbers: Assumed values of the operands that decide the control flow, by operand.
    """

    config: str
    operands: tuple[str, ...]
    results: tuple[str, ...]
    numbers: tuple[tuple[int, tuple[int, ...]], ...] = ()

    @classmethod
    def of(cls, call: Instruction, parent: Computation) -> "LoneKernel":
        """Return the kernel of a call."""
        config = {key: call.backend_config[key] for key in _CONFIG if call.backend_config.get(key)}
        numbers = _numbers(call, parent)
        if numbers:
            # The step keeps the numbers in VMEM, and alone the compiler refuses that.
            program = config["custom_call_config"]
            config["custom_call_config"] = {
                key: value for key, value in program.items() if not key.endswith(_WHERE)
            }
        return cls(
            config=json.dumps(config, sort_keys=True),
            operands=tuple(_written(parent.by_name[name].shapes[0]) for name in call.operands),
            results=tuple(map(_written, call.shapes)),
            numbers=numbers,
        )

    def key(self, chip: str) -> str:
        """A hash of everything that its trace depends on."""
        identity = [FORMAT, chip, self.config, self.operands, self.results]
        identity += [self.numbers] if self.numbers else []
        text = json.dumps([*identity, sorted(compiler_versions().items())])
        return f"{hashlib.sha256(text.encode()).hexdigest()[:40]}-kernel"

    def request(self, target: Slice) -> CompileRequest:
        """Return the compile request of the kernel for one device of a slice."""
        import jax

        from .program.entry import parse_argument

        results = [parse_argument(text) for text in self.results]

        def kernel(*arrays: Any) -> Any:
            call = jax.ffi.ffi_call(
                KERNEL_TARGET,
                results if len(results) > 1 else results[0],
                custom_call_api_version=1,
                legacy_backend_config=self.config,
            )
            return call(*arrays)

        return make_request(kernel, target, *map(parse_argument, self.operands))


def trace_kernels(
    module: HloModule,
    target: Slice,
    *,
    wanted: Callable[[Instruction], bool],
    compile_missing: bool = True,
    progress: Progress = silent,
) -> Mapping[str, CallTrace]:
    """Return the traces of a step's kernels by call name; kernels without a trace are left out.

    A kernel whose control flow depends on numbers of the running step has no trace, except
    attention over a cache, for which a full cache is assumed.

    Args:
        module: The scheduled step.
        target: The slice it was compiled for.
        wanted: Selects the calls to trace.
        compile_missing: Whether to compile kernels that are not in the cache.
        progress: Called with the number of compiles.
    """
    kernels = {
        call.name: LoneKernel.of(call, parent)
        for call, parent in kernel_calls(module)
        if wanted(call)
    }
    chip, cache = target.chip.name, CompileCache.default()
    found: dict[LoneKernel, CallTrace | None] = {}
    for kernel in set(kernels.values()):
        kept = cache.load_json(kernel.key(chip))
        if kept is not None:
            found[kernel] = CallTrace.from_data(kept["trace"]) if kept["trace"] else None
    missing = set(kernels.values()) - set(found)
    if missing and compile_missing:
        many = count_text(len(missing), "kernel")
        progress(f"simulate: {many} not seen before compiled alone, to time them")
        for kernel, trace in _compiled(missing, one_device_slice(target.chip)).items():
            cache.store_json(kernel.key(chip), {"trace": trace and trace.to_data()})
            found[kernel] = trace
    traces = {name: found.get(kernel) for name, kernel in kernels.items()}
    return {name: trace for name, trace in traces.items() if trace is not None}


def _compiled(kernels: Iterable[LoneKernel], device: Slice) -> dict[LoneKernel, CallTrace | None]:
    """Compile kernels in parallel and trace each; None where the trace is not determined.

    A kernel whose compile failed is left out, so that a later call tries it again.
    """
    from ..runtime.environment import configure_tpu_environment

    configure_tpu_environment()  # or jax would look for a TPU, slowly, in this process
    lowered: dict[LoneKernel, CompileRequest] = {}
    found: dict[LoneKernel, CallTrace | None] = {}
    for kernel in kernels:
        try:
            lowered[kernel] = kernel.request(device)
        except TPUError:  # an argument that cannot be written down, such as a semaphore
            found[kernel] = None
    answers = compile_many(lowered.values(), until="codegen", timeout_s=TIMEOUT_S, bundles=True)
    for kernel, answer in zip(lowered, answers, strict=True):
        if isinstance(answer, TPUError):
            logger.warning("a kernel could not be compiled alone: %s", answer)
            continue
        found[kernel] = None
        for name, listing in answer.kernel_listings.items():
            with contextlib.suppress(XLACompilationError):
                tables = dict(kernel.numbers)
                found[kernel] = trace_call(name, listing, device.chip.name, tables=tables)
    return found


def _numbers(call: Instruction, parent: Computation) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Return the assumed operands of attention over a cache: every slot is filled."""
    if not call.name.startswith(_OVER_A_CACHE):
        return ()
    positions, keys = (parent.by_name[call.operands[at]].shapes[0].dims for at in (1, 5))
    return (0, (0,)), (1, (keys[2] - 1,) * positions[0])


def _written(shape: Shape) -> str:
    return f"{shape.dtype}[{','.join(map(str, shape.dims))}]"

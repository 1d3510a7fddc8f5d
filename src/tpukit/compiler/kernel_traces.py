"""The Pallas kernels of a step, each compiled once more alone, so that its own bundles time it.

A step is predicted from its schedule, before code is generated, which for a whole step takes
minutes. A kernel comes with its program in the call, so that the call alone can be compiled in
seconds, to the last bundle. Alone it fetches all its arrays from HBM; small ones that the step
keeps in VMEM it would not.
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
    """The smallest slice of a generation; a program without shardings uses one device of it."""
    return list_slices(chip.name)[0]


def kernel_calls(module: HloModule) -> list[tuple[Instruction, Computation]]:
    """Every Pallas call of a compiled program, with the computation it stands in."""
    return [
        (instruction, computation)
        for computation in module.computations.values()
        for instruction in computation
        if instruction.is_kernel
    ]


@dataclass(frozen=True)
class LoneKernel:
    """One kernel without the step around it: its program, and the shapes it is called with.

    Attributes:
        config: The program.
        operands: Shapes.
        results: Shapes.
        numbers: What is taken for operands that decide what it does, by operand.
    """

    config: str
    operands: tuple[str, ...]
    results: tuple[str, ...]
    numbers: tuple[tuple[int, tuple[int, ...]], ...] = ()

    @classmethod
    def of(cls, call: Instruction, parent: Computation) -> "LoneKernel":
        """The kernel that `call` calls."""
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
        """What its trace depends on, as one hash."""
        identity = [FORMAT, chip, self.config, self.operands, self.results]
        identity += [self.numbers] if self.numbers else []
        text = json.dumps([*identity, sorted(compiler_versions().items())])
        return f"{hashlib.sha256(text.encode()).hexdigest()[:40]}-kernel"

    def request(self, target: Slice) -> CompileRequest:
        """The compile of a kernel for one device of a slice."""
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
    """What the kernels of a step do, by the name of their calls; those not told are left out.

    A kernel whose course depends on numbers that only the running step knows is not told, but
    attention over a cache, which is taken as full.

    Args:
        module: The scheduled step.
        target: The slice it was compiled for.
        wanted: Which calls to follow.
        compile_missing: Whether kernels nobody asked for before are compiled now.
        progress: Told how many are.
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
    """Compile kernels side by side and follow each; None where its course is not told.

    A kernel whose compile failed is left out, so that it is tried again another time.
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
    """Of attention over a cache: every slot is filled, as its shape has room for."""
    if not call.name.startswith(_OVER_A_CACHE):
        return ()
    positions, keys = (parent.by_name[call.operands[at]].shapes[0].dims for at in (1, 5))
    return (0, (0,)), (1, (keys[2] - 1,) * positions[0])


def _written(shape: Shape) -> str:
    return f"{shape.dtype}[{','.join(map(str, shape.dims))}]"

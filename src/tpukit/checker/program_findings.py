"""What a program really does, where that is not what its author meant: each with evidence and cost.

A finding is read from the compiled program and its predicted step, or from what the capture saw.
Nothing is guessed from names of models: a finding names the operation, its size and its time.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from ..capturing.captured import Captured, CapturedProgram
from ..compiler.hlo import HloModule
from ..compiler.program_flops import is_traced_kernel
from ..hardware.figure import flops_text
from .memory_findings import find_in_memory
from .program_finding import ProgramFinding, place_in_program
from .step_times import StepTimes
from .trace_findings import find_in_trace

if TYPE_CHECKING:
    from ..compiler.compiled import CompiledStep
    from ..compiler.timeline import StepPrediction

_LEAST_SHARE = 0.01
_SMALL_BLOCK = 128 * 256
_MANY_BLOCKS = 256
_PASSES = {"highest": "six passes", "high": "three passes"}
_MERGED_SHARE = 0.1


def find_in_program(
    captured: Captured,
    program: CapturedProgram,
    compiled: "CompiledStep",
    prediction: "StepPrediction | None",
) -> tuple[ProgramFinding, ...]:
    """Return what a captured program does, the most expensive first."""
    times = None if prediction is None else StepTimes(compiled, prediction)
    found = [
        *_kernels(program, times),
        *_float32(times),
        *_recomputation(program, times),
        *find_in_memory(program, compiled, times),
        *find_in_trace(captured, program, compiled, times),
        *_capture(captured, program),
    ]
    return tuple(sorted(found, key=lambda one: -(one.seconds or 0.0)))


def _kernels(program: CapturedProgram, times: StepTimes | None) -> Iterable[ProgramFinding]:
    """Yield each Pallas kernel with blocks and share, and those with small blocks."""
    about = program.about
    if times is None:
        for name, count in about.kernels.items():
            yield ProgramFinding("kernel", f"{name}, {count} calls{_blocks(about.blocks, name)}")
        return
    seconds: defaultdict[str, float] = defaultdict(float)
    flops: defaultdict[str, float] = defaultdict(float)
    own: set[str] = set()
    for span in times.core_spans:
        if span.cause == "kernel":
            # XLA names a call after its kernel, and numbers the calls.
            name = span.name.rstrip("0123456789").rstrip(".")
            seconds[name] += span.duration_s * span.times
            flops[name] += span.flops * span.times
            if is_traced_kernel(times.instructions[span.name]):
                own.add(name)
    for name, spent in seconds.items():
        share = spent / times.prediction.step_time_s
        blocks = _blocks(about.blocks, name)
        made = "" if name in own else ", which the compiler made of plain operations"
        yield ProgramFinding("kernel", f"{name}, {share:.0%} of the step{blocks}{made}", spent)
        cut = about.blocks.get(name)
        if cut is not None and flops[name] and share > _LEAST_SHARE and _has_small_blocks(cut):
            yield ProgramFinding(
                "small blocks",
                f"{name} multiplies in {prod(cut['grid']):,} blocks, none larger than "
                f"{max(map(_block_text, cut['blocks']), key=len)}",
                spent,
                "such blocks are the default where a table of tuned ones has no entry; state "
                "blocks of 512 to 1024 rows, or compare some with `tpukit kernel tune`",
            )


def _blocks(known: Mapping[str, Mapping[str, Any]], name: str) -> str:
    """Return a kernel's grid and blocks for a sentence; "" where the trace did not show them."""
    cut = known.get(name)
    if cut is None:
        return ""
    shapes = dict.fromkeys(_block_text(block) for block in cut["blocks"])
    grid = "x".join(map(str, cut["grid"]))
    return f", grid {grid or '1'}, blocks {', '.join(list(shapes)[:4])}" if shapes else ""


def _block_text(block: Sequence[int]) -> str:
    return "x".join(str(size) for size in block if size > 1) or "1"


def _has_small_blocks(cut: Mapping[str, Any]) -> bool:
    sizes = [prod(block) for block in cut["blocks"]]
    return bool(sizes) and max(sizes) <= _SMALL_BLOCK and prod(cut["grid"]) >= _MANY_BLOCKS


def _float32(times: StepTimes | None) -> Iterable[ProgramFinding]:
    """Yield matmuls with float32 operands."""
    if times is None:
        return
    wide = _float32_matmuls(times.compiled.module)
    heaviest, most, precise = 0.0, "", ""
    for span in times.core_spans:
        cost = span.duration_s * span.times
        if span.name in wide and cost > heaviest:
            heaviest, most = cost, place_in_program(span.op_name) or span.name
            precise = wide[span.name]
    spent = times.seconds(lambda span: span.name in wide)
    if spent <= _LEAST_SHARE * times.prediction.step_time_s:
        return
    if precise in _PASSES:
        why = f"precision {precise!r} takes {_PASSES[precise]} of the matrix unit, counted as one"
    else:
        why = "the matrix unit rounds them to bfloat16, and twice the bytes are read"
    yield ProgramFinding(
        "float32 matmul",
        f"the largest is {most}; {why}",
        spent,
        "cast both operands to bfloat16, or set preferred_element_type for the result alone",
    )


def _float32_matmuls(module: HloModule) -> dict[str, str]:
    """Return the precision of each instruction that multiplies float32 by float32, by its name.

    A fusion with such a matmul counts as one.
    """
    found: dict[str, str] = {}
    for computation in module.computations.values():
        for one in computation:
            operands = [computation.by_name.get(name) for name in one.operands[:2]]
            if one.opcode in ("dot", "convolution") and all(
                operand is not None and operand.shapes[0].dtype == "f32" for operand in operands
            ):
                found[one.name] = (one.attribute("operand_precision") or "").partition(",")[0]
    fusions = (
        one
        for computation in module.computations.values()
        for one in computation
        if one.opcode == "fusion"
    )
    for one in fusions:
        inside = [found[inner.name] for inner in module.nested(one) if inner.name in found]
        if inside:
            found[one.name] = inside[0]
    return found


def _recomputation(program: CapturedProgram, times: StepTimes | None) -> Iterable[ProgramFinding]:
    """Yield what `jax.checkpoint` costs, and where the compiler took it back."""
    asked = program.about.recomputed_flops
    if times is None or not program.about.remats:
        return
    done = times.recomputed_flops * program.devices
    if asked and done < _MERGED_SHARE * asked:
        yield ProgramFinding(
            "remat not in effect",
            f"jax.checkpoint asks for {flops_text(asked)} to be computed again, and the compiled "
            f"program computes {flops_text(done)} again",
            None,
            "the compiler merged it with the forward pass: leave out prevent_cse=False outside of "
            "a scan",
        )
    elif times.recomputed_s > _LEAST_SHARE * times.prediction.step_time_s:
        yield ProgramFinding(
            "recomputation",
            f"jax.checkpoint computes {flops_text(done)} again",
            times.recomputed_s,
            "a policy that keeps more of the forward pass saves time where HBM has room",
        )


def _capture(captured: Captured, program: CapturedProgram) -> Iterable[ProgramFinding]:
    if program.devices < captured.slice.devices:
        yield ProgramFinding(
            "idle devices",
            f"the program runs on {program.devices} of {captured.slice.devices} devices",
            None,
            "build the mesh from all of jax.devices() and shard its arguments",
        )
    if program.open_loops:
        yield ProgramFinding(
            "open loop",
            f"{program.open_loops} loops have no constant length; each is counted once",
            None,
            "use lax.scan or fori_loop with constant bounds where the length is known",
        )
    for read in captured.reads:
        if read["how"] == "decided":
            yield ProgramFinding(
                "value decided",
                f"{read['line']} branches on a value that was not computed; it was taken as zero",
                None,
                "the other branch was not captured; judge it with a run that takes it",
            )

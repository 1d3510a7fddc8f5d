"""Find what a captured program does that its author may not intend, with evidence and cost.

A finding is read from the compiled program, its predicted step or the capture, never guessed from
model names. It has the operation, its size and its time.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

from ..capturing.captured import Captured, CapturedProgram
from ..compiler.compiled import CompiledStep
from ..compiler.hlo import HloModule
from ..compiler.program_flops import is_traced_kernel
from ..compiler.timeline import Machine
from ..hardware.figure import bytes_text, flops_text, seconds_text
from ..plain_data import JsonMapping
from .memory_findings import find_in_memory
from .program_finding import ProgramFinding, StepTimes, place_in_program, some_names

if TYPE_CHECKING:
    from ..compiler.timeline import StepPrediction


def find_in_trace(
    captured: Captured,
    program: CapturedProgram,
    compiled: CompiledStep,
    times: StepTimes | None,
) -> Iterable[ProgramFinding]:
    """Yield findings from the jaxpr and the arguments of the step's first call."""
    yield from _scores(program, times)
    yield from _callbacks(program)
    yield from _recompiles(captured, program, compiled)
    yield from _transfers(captured, program, times)


def _scores(program: CapturedProgram, times: StepTimes | None) -> Iterable[ProgramFinding]:
    """Yield attention scores that are computed as whole arrays, which a kernel would keep in VMEM.

    If their lines take no time, the compiler has replaced them by its own kernel.
    """
    for scores in program.evidence.get("scores", ()):
        spent = None if times is None else times.seconds_of_lines(set(scores["lines"]))
        if times is not None and (spent or 0.0) < _LEAST_SHARE * times.prediction.step_time_s:
            continue
        beside = f", beside the kernels {', '.join(program.about.kernels)}"
        yield ProgramFinding(
            "attention scores",
            f"{scores['type']} ({bytes_text(scores['bytes'])} over all devices) is computed at "
            f"{scores['line']} without a kernel" + (beside if program.about.kernels else ""),
            spent,
            "an attention kernel for TPUs (splash attention, or tpukit.kernels) keeps them in VMEM",
        )


def _callbacks(program: CapturedProgram) -> Iterable[ProgramFinding]:
    """Yield calls into Python; their duration is unknown."""
    if not program.about.callbacks:
        return
    seen = program.evidence.get("callbacks", ())
    places = [f"{one['name']} at {one['line']}" for one in seen]
    where = f" ({some_names(list(dict.fromkeys(places)))})" if places else ""
    yield ProgramFinding(
        "host callback",
        f"{program.about.callbacks} calls into Python per step{where}",
        None,
        "each one waits for the host; return the value and log it outside of jit",
    )


def _recompiles(
    captured: Captured, program: CapturedProgram, compiled: CompiledStep
) -> Iterable[ProgramFinding]:
    """Yield reasons for which jax compiles the step again."""
    changes = program.evidence.get("changes", ())
    if changes:
        first = changes[0]
        others = f", and {len(changes) - 1} more arguments" if len(changes) > 1 else ""
        yield ProgramFinding(
            "recompile",
            f"{first['argument']} is {first['before']} in the first call and {first['after']} in "
            f"its results{others}, so the second step compiles again "
            f"({seconds_text(compiled.compile_s)} here, measured)",
            None,
            "make the first state as the step returns it: typed arrays, and placed on the mesh",
        )
    alike = Counter((one.name, one.kind) for one in captured.listed if one.kind != "other")
    variants = alike[program.about.name, program.about.kind]
    if variants > 1:
        yield ProgramFinding(
            "recompile",
            f"{program.name} was compiled {variants} times for different arguments before its "
            "step was complete",
            None,
            "give it arrays of one shape and type: pad the last batch, and pass numbers as arrays",
        )


def _transfers(
    captured: Captured, program: CapturedProgram, times: StepTimes | None
) -> Iterable[ProgramFinding]:
    """Yield transfers between host and HBM in each step."""
    if times is None:
        return
    facts, step_s = program.program.facts, times.prediction.step_time_s
    from_host = set(program.evidence.get("from_host", ())) - set(program.state)
    purposes = facts.argument_purposes
    fed = {number for number, purpose in enumerate(purposes) if purpose == "batch inputs"}
    fed -= set(facts.donated)
    amount = sum(map(program.bytes_on_device, fed | from_host))
    seconds = amount / Machine.of(captured.slice).host_bytes_per_s
    if seconds > _LEAST_SHARE * step_s or from_host:
        names = some_names([facts.argument_names[number] for number in sorted(fed | from_host)])
        how = "as numpy arrays at the call itself" if from_host else "from the host"
        yield ProgramFinding(
            "transfer",
            f"{bytes_text(amount)} per device come {how} in each step ({names})",
            seconds,
            "jax.device_put the next batch while the step runs, so that this time is hidden",
        )
    waited = times.prediction.seconds_by_cause.get("host", 0.0)
    if waited > _LEAST_SHARE * step_s:
        moved = bytes_text(times.compiled.memory.host_bytes)
        yield ProgramFinding(
            "offload",
            f"the step waits for {moved} that it keeps in host memory",
            waited,
            "keep it in HBM where there is room, or offload what is needed later in the step",
        )


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
    """Return findings on a captured program, the most expensive first."""
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
    """Yield each Pallas kernel with its blocks and share of time, and kernels with small blocks."""
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


def _blocks(known: Mapping[str, JsonMapping], name: str) -> str:
    """Return a kernel's grid and blocks as text; "" if the trace does not have them."""
    cut = known.get(name)
    if cut is None:
        return ""
    shapes = dict.fromkeys(_block_text(block) for block in cut["blocks"])
    grid = "x".join(map(str, cut["grid"]))
    return f", grid {grid or '1'}, blocks {', '.join(list(shapes)[:4])}" if shapes else ""


def _block_text(block: Sequence[int]) -> str:
    return "x".join(str(size) for size in block if size > 1) or "1"


def _has_small_blocks(cut: JsonMapping) -> bool:
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
    """Return the precision of each instruction, by name, that multiplies float32 by float32.

    A fusion that contains such a matmul is included.
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
    """Yield the cost of `jax.checkpoint`, or that the compiler undid it."""
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

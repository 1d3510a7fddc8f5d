"""What the trace of a captured step shows: attention without a kernel, Python calls, recompiles."""

from collections import Counter
from collections.abc import Iterable

from ..capturing.captured import Captured, CapturedProgram
from ..compiler.compiled import CompiledStep
from ..compiler.timeline import Machine
from ..hardware.figure import bytes_text, seconds_text
from .program_finding import ProgramFinding, some_names
from .step_times import StepTimes

_LEAST_SHARE = 0.01


def find_in_trace(
    captured: Captured,
    program: CapturedProgram,
    compiled: CompiledStep,
    times: StepTimes | None,
) -> Iterable[ProgramFinding]:
    """Yield what the jaxpr and the arguments of the step's first call show."""
    yield from _scores(program, times)
    yield from _callbacks(program)
    yield from _recompiles(captured, program, compiled)
    yield from _transfers(captured, program, times)


def _scores(program: CapturedProgram, times: StepTimes | None) -> Iterable[ProgramFinding]:
    """Yield attention scores that are computed as whole arrays: a kernel keeps them in VMEM.

    Where their lines take no time, the compiler has put a kernel of its own in their place.
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
    """Yield calls into Python; what Python takes is not known."""
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
    """Yield what goes between host and HBM in each step."""
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

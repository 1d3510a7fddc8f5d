"""What bounds a program, in shares that add up to one, and recommendations with their figures."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...errors import TPUValidationError
from ...hardware.figure import flops_text, seconds_text
from ...shown import Facts, MappedResult, Renderable
from .attribution import HostTimes, OpTotal, attribute
from .findings import Findings, ProfileFinding, find
from .judging import BY_INTENSITY, COMMUNICATION, COMPUTE, INPUT, KINDS, MEMORY, OVERHEAD
from .recording import Recording

if TYPE_CHECKING:
    from .steps import PredictedStep

OPS_KEPT = 50


@dataclass(frozen=True)
class OpShare(Facts):
    """One op of an analysis.

    Attributes:
        name: The HLO instruction, or a kernel without one.
        kind: What bounds it, one of `KINDS`.
        by: How `kind` was determined: "intensity", "opcode", "name", or "model" for a predicted op.
        seconds: Of all its runs, over all devices.
        opcode: Of the instruction, or the kind of collective; "" where unknown.
        source: "model.py:12", or "".
        flops: Of one run; None where the program does not contain them.
        moved_bytes: Of one run.
    """

    name: str
    kind: str
    by: str
    seconds: float
    times: int
    opcode: str = ""
    op_name: str = ""
    source: str = ""
    flops: float | None = None
    moved_bytes: float | None = None

    @classmethod
    def of(cls, total: OpTotal) -> "OpShare":
        """Build the share from a recorded op."""
        facts = total.judged.facts
        return cls(
            name=total.name,
            kind=total.judged.kind,
            by=total.judged.by,
            seconds=total.seconds,
            times=total.times,
            opcode=(facts.collective or facts.opcode) if facts else "",
            op_name=total.op_name,
            source=total.source,
            flops=facts.matrix_flops if facts else None,
            moved_bytes=facts.moved_bytes if facts else None,
        )

    @property
    def where(self) -> str:
        """Where the op comes from: source line, jax op name or instruction."""
        return self.source or self.op_name.rpartition("/")[2] or self.name


@dataclass(frozen=True, kw_only=True)
class BottleneckAnalysis(MappedResult):
    """What bounds a program. Reads like a mapping: `analysis["compute_bound"]`.

    Shares are of the profiled time over all devices without compiling; they add up to one.

    Attributes:
        origin: "measured" from a recording, "model" from the compiler's timeline.
        where: The devices that ran it, or the slice it was predicted for.
        shares: By kind: compute, memory, communication, input, overhead.
        duration_s: Profiled seconds without compiling; of one step for a prediction.
        devices: Number of devices; the shares are their mean.
        compile_s: Seconds of compiling in the profiled time, which the shares exclude.
        busy: Share of time in which devices were not waiting.
        ops: The ops that take most time, in order.
        judged_by_intensity: Share of the ops' time whose verdict comes from FLOPs and bytes.
        roof: The source of the roofline that those ops were compared with.
        notes: What is missing, and why.
    """

    label: str
    origin: str
    where: str
    shares: Mapping[str, float]
    duration_s: float
    devices: int
    compile_s: float = 0.0
    busy: float
    ops: tuple[OpShare, ...] = field(default=(), repr=False)
    findings: Findings = field(default_factory=Findings, repr=False)
    judged_by_intensity: float | None = None
    roof: str = ""
    notes: tuple[str, ...] = ()
    _facts = (
        "label origin where **bounds largest recommendations duration_s devices compile_s "
        "device_utilization=busy ops **findings judged_by_intensity roof notes"
    )

    @property
    def largest(self) -> str:
        """What bounds most of the time, one of `KINDS`."""
        return max(self.shares, key=lambda kind: self.shares[kind])

    @property
    def recommendations(self) -> list[str]:
        """Recommendations with their figures, the costliest first."""
        return recommend(self)

    @property
    def bounds(self) -> dict[str, float]:
        """The shares as they are named in the JSON, such as "compute_bound"."""
        return {f"{kind}_bound": self.shares[kind] for kind in KINDS}

    def __rich__(self) -> Renderable:
        """Return the shares as bars, the heaviest ops, and the recommendations."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        title = f"{self.label} on {self.where}: {seconds_text(self.duration_s)}  [{self.origin}]"
        shares = Table(box=None, show_header=False, pad_edge=False)
        for kind in KINDS:
            share = self.shares[kind]
            shares.add_row(f"{kind} bound", f"{share:6.1%}", "█" * round(share * 40))
        ops = Table("op", "bound by", "seconds", "times", "from", box=None, pad_edge=False)
        for op in self.ops[:8]:
            ops.add_row(
                Text(op.name), op.kind, seconds_text(op.seconds), str(op.times), Text(op.where)
            )
        parts: list[Any] = [Text(title, style="bold"), shares]
        parts += ["", ops] if self.ops else []
        parts += [Text(f"- {line}") for line in self.recommendations]
        return Group(*parts, *[Text(f"note: {note}", style="dim") for note in self.notes])


def analyze(recording: Recording) -> BottleneckAnalysis:
    """Analyze what bounds a recorded program.

    Raises:
        TPUValidationError: No device ran an op in it.
    """
    return analysis_of(recording, attribute(recording))


def analysis_of(recording: Recording, times: Sequence[HostTimes]) -> BottleneckAnalysis:
    """Return the analysis of a recording whose time has been attributed."""
    devices = [device for host in times for device in host.devices]
    counted = sum(device.counted_s for device in devices)
    if not counted:
        raise TPUValidationError(
            f"no device ran anything in the profile '{recording.label}'; run the program inside "
            "the block, after a first call that compiles it."
        )
    ops = sorted((op for host in times for op in host.ops), key=lambda op: -op.seconds)
    in_ops = sum(op.seconds for op in ops)
    intensity = sum(op.seconds for op in ops if op.judged.by == BY_INTENSITY)
    roof = next((host.roof for host in times if host.roof is not None), None)
    return BottleneckAnalysis(
        label=recording.label,
        origin="measured",
        where=f"{recording.device_count} x {recording.device_kind}",
        shares={kind: sum(device.seconds[kind] for device in devices) / counted for kind in KINDS},
        duration_s=counted / len(devices),
        devices=len(devices),
        compile_s=sum(device.compile_s for device in devices) / len(devices),
        busy=sum(device.busy_s for device in devices) / counted,
        ops=tuple(OpShare.of(op) for op in ops[:OPS_KEPT]),
        findings=find(times),
        judged_by_intensity=intensity / in_ops if in_ops else None,
        roof=f"{roof.source} ({roof.origin})" if roof else "",
        notes=tuple(_notes(recording, times)),
    )


def _notes(recording: Recording, times: Sequence[HostTimes]) -> Iterator[str]:
    programs = {program for host in times for program in host.host.programs.values()}
    for program in sorted(programs, key=lambda program: program.name):
        if program.unreadable:
            yield f"the program {program.name} cannot be read: {program.unreadable}"
    unknown = sum(op.seconds for host in times for op in host.ops if op.judged.facts is None)
    total = sum(op.seconds for host in times for op in host.ops)
    if total and unknown / total > 0.05:
        yield (
            f"{unknown / total:.0%} of the ops' time belongs to no recorded program; those ops are "
            "judged by their names."
        )
    kinds = {host.annotations.get("label") for host in recording.hosts}
    if kinds == {None}:
        yield (
            "recorded without TPUProfiler or the hook of a run: the time from the first op to the "
            "last counts, or the annotated steps where there are such."
        )


def analyze_predicted(step: "PredictedStep") -> BottleneckAnalysis:
    """Analyze what bounds a predicted step, by the compiler's timeline."""
    total = sum(step.seconds_by_kind.values())
    if not total:
        raise TPUValidationError(
            f"the check of {step.name} predicts no step: run it without --memory-only, on "
            "something that fits."
        )
    shares = {kind: step.seconds_by_kind[kind] / total for kind in KINDS}
    return BottleneckAnalysis(
        label=step.name,
        origin="model",
        where=step.where,
        shares=shares,
        duration_s=total,
        devices=1,
        busy=sum(shares[kind] for kind in ("compute", "memory", "communication")),
        ops=tuple(step.ops[:OPS_KEPT]),
        notes=("nothing was recorded: these are shares of the compiler's predicted timeline.",),
    )


# A recommendation is made from these shares of the time on.
WORTH = {INPUT: 0.10, COMMUNICATION: 0.10, MEMORY: 0.35, OVERHEAD: 0.15, COMPUTE: 0.50}
UNFUSED, COPIES = 0.05, 0.03
_WAYS = {
    "all-reduce": "accumulate gradients over micro-batches, or scatter them (FSDP)",
    "all-gather": "gather larger pieces less often, or keep unsharded weights on each device",
    "reduce-scatter": "accumulate gradients over micro-batches",
    "all-to-all": "route tokens inside a host first, or place the experts differently",
    "collective-permute": "give the ring larger blocks",
}


@dataclass(frozen=True)
class _Advice:
    weight: float
    words: str


def recommend(analysis: BottleneckAnalysis) -> list[str]:
    """Return the recommendations for an analysis, the costliest first."""
    advice = [*_by_share(analysis), *_by_finding(analysis)]
    return [entry.words for entry in sorted(advice, key=lambda entry: -entry.weight)]


def _by_share(analysis: BottleneckAnalysis) -> Iterator[_Advice]:
    for kind, least in WORTH.items():
        share = analysis.shares[kind]
        if share >= least:
            cost = f"{share:.0%} of {seconds_text(analysis.duration_s)} ({analysis.origin})"
            yield _Advice(share, _SENTENCES[kind](analysis, cost))


def _of_input(analysis: BottleneckAnalysis, cost: str) -> str:
    waits = analysis.findings.waits
    where = f", most of it in {waits[0].where}" if waits and waits[0].where else ""
    return (
        f"Devices wait for the host {cost}{where}: prepare batches in other threads or processes "
        "while the step runs (open_data does), and copy the next batch before it is needed."
    )


def _of_communication(analysis: BottleneckAnalysis, cost: str) -> str:
    heaviest = _heaviest(analysis, COMMUNICATION)
    named, way = "", "raise the batch per device, or search options that overlap it (flags tune)"
    if heaviest is not None:
        named = f", most of it in {heaviest.name} ({heaviest.where}, {_seconds(heaviest)})"
        known = f"{heaviest.opcode} {heaviest.name}"
        way = next((words for kind, words in _WAYS.items() if kind in known), way)
    return (
        f"Devices wait for each other {cost}{named}: {way}, or try another mesh "
        "(tpukit check --mesh)."
    )


def _of_memory(analysis: BottleneckAnalysis, cost: str) -> str:
    heaviest = _heaviest(analysis, MEMORY)
    named = ""
    if heaviest is not None:
        named = f", most of it in {heaviest.name} ({heaviest.where}, {_seconds(heaviest)})"
    return (
        f"The device's memory bounds {cost}{named}: keep activations in bfloat16, fuse ops that "
        "read the same arrays, use kernels for attention, norms and cross-entropy, and raise the "
        "batch so that weights are read less often."
    )


def _of_overhead(analysis: BottleneckAnalysis, cost: str) -> str:
    runs = sum(op.times for op in analysis.ops)
    length = sum(op.seconds for op in analysis.ops) / runs if runs else 0.0
    small = f"; the {runs:,} runs of its heaviest ops last {seconds_text(length)} on average"
    return (
        f"Starting programs and ops takes {cost}{small if runs else ''}: call one jitted function "
        "a step, run all layers in one scan, and raise the batch."
    )


def _of_compute(analysis: BottleneckAnalysis, cost: str) -> str:
    heaviest = _heaviest(analysis, COMPUTE)
    named = ""
    if heaviest is not None:
        rate = (
            (heaviest.flops or 0.0) * heaviest.times / heaviest.seconds if heaviest.seconds else 0
        )
        speed = f", {flops_text(rate)}/s on one device" if rate else ""
        named = f", most of it in {heaviest.name} ({heaviest.where}, {_seconds(heaviest)}{speed})"
    return (
        f"Arithmetic bounds {cost}{named}: which is the best case. Narrower formats "
        "(bfloat16, int8 matmuls), less recomputing or more devices take less time."
    )


_SENTENCES = {
    INPUT: _of_input,
    COMMUNICATION: _of_communication,
    MEMORY: _of_memory,
    OVERHEAD: _of_overhead,
    COMPUTE: _of_compute,
}


def _by_finding(analysis: BottleneckAnalysis) -> Iterator[_Advice]:
    total = analysis.duration_s * analysis.devices
    unfused = sum(finding.seconds for finding in analysis.findings.unfused)
    if unfused > UNFUSED * total:
        share = unfused / total
        yield _Advice(
            share,
            f"{len(analysis.findings.unfused)} ops run unfused for {share:.0%} of the time "
            f"({analysis.origin}), first {_named(analysis.findings.unfused[0])}: keep elementwise "
            "work and changes of layout in one jitted function beside what they feed.",
        )
    # Copies by the host delay one device after another, so the window of one device counts. A call
    # that copies a result first waits for it, which costs nothing while the device is busy.
    copies = sum(transfer.seconds for transfer in analysis.findings.transfers)
    share = min(copies / analysis.duration_s, analysis.shares[INPUT])
    if share > COPIES:
        yield _Advice(
            share,
            f"Copies between host and device take {seconds_text(copies)} ({analysis.origin}), "
            f"first {_named(analysis.findings.transfers[0])}: keep arrays on the device, read "
            "metrics a step late, and donate what is not needed any more.",
        )
    if analysis.compile_s > 0:
        yield _Advice(
            0.0,
            f"{seconds_text(analysis.compile_s)} of compiling are in the profile and are not "
            "counted: call the function once before the profiled block, and keep shapes the same.",
        )


def _heaviest(analysis: BottleneckAnalysis, kind: str) -> OpShare | None:
    return next((op for op in analysis.ops if op.kind == kind), None)


def _seconds(op: OpShare) -> str:
    return f"{seconds_text(op.seconds)} in {op.times:,} run{'s' * (op.times != 1)}"


def _named(finding: ProfileFinding) -> str:
    return f"{finding} ({seconds_text(finding.seconds)} in {finding.times:,})"

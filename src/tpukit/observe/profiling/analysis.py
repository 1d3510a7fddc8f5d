"""What bounds a program, in shares that add up to one, and what to do about it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from ...errors import TPUValidationError
from ...hardware.figure import seconds_text
from ...runtime.mapped_result import MappedResult
from .attribution import HostTimes, OpTotal, attribute
from .findings import Findings, find
from .judging import BY_INTENSITY, KINDS
from .recording import Recording

if TYPE_CHECKING:
    from .steps import PredictedStep

OPS_KEPT = 50


@dataclass(frozen=True)
class OpShare:
    """One op of an analysis.

    Attributes:
        name: The HLO instruction, or a kernel that belongs to none.
        kind: What bounds it, one of `KINDS`.
        by: How that is known: "intensity", "opcode", "name", or "model" for a predicted op.
        seconds: Of all its runs on all devices.
        opcode: Of the instruction, or the kind of collective it is; "" where it is not known.
        source: "model.py:12", or "".
        flops: Of one run; None where the program does not tell.
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
        """An op as it was recorded."""
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
        """Where it comes from, as exactly as is known."""
        return self.source or self.op_name.rpartition("/")[2] or self.name

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return dict(vars(self))


@dataclass(frozen=True, kw_only=True)
class BottleneckAnalysis(MappedResult):
    """What bounds a program. Reads like a mapping: `analysis["compute_bound"]`.

    Shares are of the profiled time over all devices, compiling left out; they add up to one.

    Attributes:
        origin: "measured" from a recording, "model" from the compiler's timeline.
        where: What ran it, or the slice it was predicted for.
        shares: By kind: compute, memory, communication, input, overhead.
        duration_s: Of the profiled time, compiling left out; of one step where it was predicted.
        devices: How many devices the shares are the mean of.
        compile_s: Compiling inside the profiled time, which the shares leave out.
        busy: Share of time in which devices did something other than wait.
        ops: The heaviest, the first first.
        judged_by_intensity: Share of the ops' time whose verdict comes from FLOPs and bytes.
        roof: What those were held against.
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

    @property
    def largest(self) -> str:
        """What bounds most of the time, one of `KINDS`."""
        return max(self.shares, key=lambda kind: self.shares[kind])

    @property
    def recommendations(self) -> list[str]:
        """What to do, the costliest first, each with the figure behind it."""
        from .recommendations import recommend

        return recommend(self)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "label": self.label,
            "origin": self.origin,
            "where": self.where,
            **{f"{kind}_bound": self.shares[kind] for kind in KINDS},
            "largest": self.largest,
            "recommendations": self.recommendations,
            "duration_s": self.duration_s,
            "devices": self.devices,
            "compile_s": self.compile_s,
            "device_utilization": self.busy,
            "ops": [op.to_dict() for op in self.ops],
            **self.findings.to_dict(),
            "judged_by_intensity": self.judged_by_intensity,
            "roof": self.roof,
            "notes": list(self.notes),
        }

    def __rich__(self) -> Any:
        """The shares as bars, the heaviest ops, what to do."""
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
    """Say what bounds a recorded program.

    Raises:
        TPUValidationError: No device ran anything in it.
    """
    return analysis_of(recording, attribute(recording))


def analysis_of(recording: Recording, times: Sequence[HostTimes]) -> BottleneckAnalysis:
    """The analysis of a recording whose time has been attributed."""
    devices = [device for one in times for device in one.devices]
    counted = sum(device.counted_s for device in devices)
    if not counted:
        raise TPUValidationError(
            f"no device ran anything in the profile '{recording.label}'; run the program inside "
            "the block, after a first call that compiles it."
        )
    ops = sorted((op for one in times for op in one.ops), key=lambda op: -op.seconds)
    in_ops = sum(op.seconds for op in ops)
    intensity = sum(op.seconds for op in ops if op.judged.by == BY_INTENSITY)
    roof = next((one.roof for one in times if one.roof is not None), None)
    return BottleneckAnalysis(
        label=recording.label,
        origin="measured",
        where=f"{recording.device_count} x {recording.device_kind}",
        shares={kind: sum(one.seconds[kind] for one in devices) / counted for kind in KINDS},
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
    programs = {program for one in times for program in one.host.programs.values()}
    for program in sorted(programs, key=lambda program: program.name):
        if program.unreadable:
            yield f"the program {program.name} cannot be read: {program.unreadable}"
    unknown = sum(op.seconds for one in times for op in one.ops if op.judged.facts is None)
    whole = sum(op.seconds for one in times for op in one.ops)
    if whole and unknown / whole > 0.05:
        yield (
            f"{unknown / whole:.0%} of the ops' time belongs to no recorded program: those are "
            "judged by their names."
        )
    kinds = {host.annotations.get("label") for host in recording.hosts}
    if kinds == {None}:
        yield (
            "recorded without TPUProfiler or the hook of a run: the time from the first op to the "
            "last counts, or the annotated steps where there are such."
        )


def analyze_predicted(step: "PredictedStep") -> BottleneckAnalysis:
    """Say what bounds a step that was only predicted, by the compiler's timeline."""
    whole = sum(step.seconds_by_kind.values())
    if not whole:
        raise TPUValidationError(
            f"the check of {step.name} predicts no step: run it without --memory-only, on "
            "something that fits."
        )
    shares = {kind: step.seconds_by_kind[kind] / whole for kind in KINDS}
    return BottleneckAnalysis(
        label=step.name,
        origin="model",
        where=step.where,
        shares=shares,
        duration_s=whole,
        devices=1,
        busy=sum(shares[kind] for kind in ("compute", "memory", "communication")),
        ops=tuple(step.ops[:OPS_KEPT]),
        notes=("nothing was recorded: these are shares of the compiler's predicted timeline.",),
    )

"""One step of one device, predicted or measured, in the same form: spans and ops."""

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from ...checker.report import Report, read_report
from ...checker.report.schema import as_report, spans_of
from ...compiler.timeline import StepPrediction, TrackSpan
from ...errors import TPUValidationError
from ...plain_data import JsonMapping
from ..diagnosis.evidence import CAUSES_BY_KIND
from .analysis import OpShare
from .attribution import HostTimes
from .judging import (
    COMMUNICATION,
    INPUT,
    KINDS,
    MEMORY,
    OVERHEAD,
    is_beside_the_core,
    judge,
    roof_of,
)
from .recording import DeviceTrack, HostRecording, Interval, OpEvent, Recording

if TYPE_CHECKING:
    from ...checker.result import CheckResult

# Waiting for the host is "host" in a timeline and "input" here.
_KIND_OF_CAUSE = {
    cause: INPUT if kind == "host" else kind
    for kind, causes in CAUSES_BY_KIND.items()
    for cause in causes
}
_CAUSE_OF_KIND = {MEMORY: "hbm", COMMUNICATION: "ici", INPUT: "host", OVERHEAD: "loop"}


@dataclass(frozen=True)
class PredictedStep:
    """A step predicted by the compiler's timeline.

    Attributes:
        where: The slice it was compiled for.
        device_kinds: Names of its device in jax.
    """

    name: str
    where: str
    device_kinds: tuple[str, ...]
    step_time_s: float
    seconds_by_kind: Mapping[str, float]
    spans: tuple[TrackSpan, ...] = field(repr=False)

    @property
    def ops(self) -> list[OpShare]:
        """Ops of the core, the heaviest first."""
        return sorted(_ops_of(self.spans), key=lambda op: -op.seconds)


def predicted_step(
    given: "CheckResult | StepPrediction | JsonMapping | Path | str",
) -> PredictedStep:
    """Return the predicted step of a check, its report or report file, or of a prediction.

    Raises:
        TPUValidationError: It is none of these, or predicts nothing.
    """
    from ...checker.result import CheckResult

    if isinstance(given, StepPrediction):
        return _of_prediction(given)
    if isinstance(given, CheckResult):
        return _of_report(given.to_report())
    if isinstance(given, str | Path):
        return _of_report(read_report(Path(given)))
    if isinstance(given, Mapping):  # pyright: ignore[reportUnnecessaryIsInstance]  anything may come
        return _of_report(as_report(given))
    raise TPUValidationError(
        f"{type(given).__name__} is no predicted step; give the result of tpukit.check, its "
        "report, the file that `tpukit check … --json` printed, or a StepPrediction."
    )


def _of_prediction(prediction: StepPrediction) -> PredictedStep:
    return PredictedStep(
        name="predicted step",
        where=str(prediction.slice),
        device_kinds=prediction.slice.chip.device_kinds,
        step_time_s=prediction.step_time_s,
        seconds_by_kind=_by_kind(prediction.seconds_by_cause),
        spans=prediction.spans,
    )


def _of_report(report: Report) -> PredictedStep:
    from ...hardware import get_chip

    prediction = report.get("prediction")
    name = report.get("program", "program")
    if not prediction:
        why = report.get("no_prediction") or "the check stopped at the verdict on memory"
        raise TPUValidationError(f"the check of {name} predicts no step ({why}).")
    chip = report.get("chip")
    return PredictedStep(
        name=name,
        where=str((report.get("slice") or {}).get("name", "an unnamed slice")),
        device_kinds=get_chip(chip["name"]).device_kinds if chip else (),
        step_time_s=float(prediction["step_time_s"]),
        seconds_by_kind=_by_kind(prediction["seconds_by_cause"]),
        spans=spans_of(report),
    )


def _by_kind(seconds: Mapping[str, float]) -> dict[str, float]:
    by_kind: dict[str, float] = dict.fromkeys(KINDS, 0.0)
    for cause, amount in seconds.items():
        by_kind[_KIND_OF_CAUSE.get(cause, OVERHEAD)] += amount
    return by_kind


def _ops_of(spans: Sequence[TrackSpan]) -> Iterator[OpShare]:
    for span in spans:
        if span.track == "core" and span.cause != "loop":
            yield OpShare(
                name=span.name,
                kind=_KIND_OF_CAUSE.get(span.cause, OVERHEAD),
                by="model",
                seconds=span.duration_s * span.times,
                times=span.times,
                op_name=span.op_name,
                flops=span.flops,
                moved_bytes=span.bytes,
            )


@dataclass(frozen=True)
class MeasuredStep:
    """A recorded step.

    Attributes:
        steps: Number of steps in the recording.
        ops: Seconds and runs per step and device, the mean over all.
        spans: Spans of one step of one device, the one of median length.
        step_time_s: Mean seconds from the beginning of a step to that of the next.
    """

    name: str
    where: str
    device_kind: str
    steps: int
    step_time_s: float
    ops: tuple[OpShare, ...]
    spans: tuple[TrackSpan, ...] = field(repr=False)


def measured_step(recording: Recording, times: Sequence[HostTimes]) -> MeasuredStep:
    """Return one step of a recording whose time has been attributed."""
    counted = [device.counted_s for host in times for device in host.devices]
    main = _main_program(times)
    steps = max((host.host.steps for host in times), default=0) or _count_steps(times, main)
    shares = steps * len(counted)
    ops = [
        replace(OpShare.of(op), seconds=op.seconds / shares, times=max(1, round(op.times / shares)))
        for host in times
        for op in host.ops
    ]
    host = times[0].host
    track = host.devices[0]
    return MeasuredStep(
        name=recording.label,
        where=f"{recording.device_count} x {recording.device_kind}",
        device_kind=recording.device_kind,
        steps=steps,
        step_time_s=sum(counted) / len(counted) / steps,
        ops=tuple(sorted(ops, key=lambda op: -op.seconds)),
        spans=tuple(_spans(track, host, _step_interval(track, host, main))),
    )


def _main_program(times: Sequence[HostTimes]) -> str:
    """Return the program that takes the most time."""
    seconds: dict[str, float] = {}
    for host in times:
        for op in host.ops:
            seconds[op.program] = seconds.get(op.program, 0.0) + op.seconds
    return max(seconds, key=lambda name: seconds[name], default="")


def _count_steps(times: Sequence[HostTimes], main: str) -> int:
    """Return how often the main program ran on a device, by its ops that run once per run.

    The count is a median weighted by time, because unnamed functions make several programs of one
    name, of which the largest matters.
    """
    counted = sorted(
        (op.times / len(host.devices), op.seconds)
        for host in times
        for op in host.ops
        if op.program == main and op.judged.facts and op.judged.facts.runs_once
    )
    left = sum(seconds for _, seconds in counted) / 2
    for count, seconds in counted:
        left -= seconds
        if left <= 0:
            return max(1, round(count))
    return 1


def _runs_once(host: HostRecording, event: OpEvent) -> bool:
    # The event has the program's number; several programs may have one name.
    program = host.program_of(event)
    facts = None if program is None else program.facts(event.name)
    return facts is not None and facts.runs_once


def _step_interval(track: DeviceTrack, host: HostRecording, main: str) -> Interval:
    """Return the interval of the main program's run of median length."""
    start, end = host.window
    own = [op for op in track.ops if op.program == main and start <= op.start and op.end <= end]
    starts = [op.start for op in own]

    def holds_own(run: Interval) -> bool:
        at = bisect_left(starts, run[0])
        return at < len(starts) and starts[at] < run[1]

    runs = [run for run in track.runs if holds_own(run) and start <= run[0] and run[1] <= end]
    if not track.runs:
        # A GPU's file has no runs, so a run begins at the first op that runs once.
        first = next((op.name for op in own if _runs_once(host, op)), "")
        begins = [op.start for op in own if op.name == first]
        runs = list(pairwise([*begins, max(op.end for op in own)])) if begins else []
    if not runs:
        return host.window
    lengths = sorted(runs, key=lambda run: run[1] - run[0])
    return lengths[len(lengths) // 2]


def _spans(track: DeviceTrack, host: HostRecording, interval: Interval) -> Iterator[TrackSpan]:
    roof = roof_of(track, host.annotations.get("device_kind", ""))
    for op in track.ops:
        if op.start < interval[0] or op.end > interval[1]:
            continue
        verdict = judge(op, host, roof)
        facts = verdict.facts
        arithmetic = "matrix" if facts is None or facts.is_product else "vector"
        yield TrackSpan(
            track=_track_of(op, verdict.kind),
            name=facts.name if facts else op.own_name,
            start_s=(op.start - interval[0]) / 1e9,
            duration_s=(op.end - op.start) / 1e9,
            cause=_CAUSE_OF_KIND.get(verdict.kind, arithmetic),
            op_name=facts.op_name if facts else "",
            flops=(facts.matrix_flops or 0.0) if facts else 0.0,
            bytes=(facts.moved_bytes or 0.0) if facts else 0.0,
        )


def _track_of(op: OpEvent, kind: str) -> str:
    """Return the row of the op's counterpart in a predicted step."""
    if not op.is_async and not is_beside_the_core(op):
        return "core"
    return {COMMUNICATION: "ici", INPUT: "host"}.get(kind, "hbm")

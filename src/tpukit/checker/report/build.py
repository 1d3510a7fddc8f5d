"""`build_report`: convert a check to plain data."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from ...compiler.memory.assignment import Schedule, parse_live_ranges
from ...compiler.timeline import Machine, Network, TrackSpan
from ...hardware import Slice
from ...plain_data import JsonMapping
from ..capture_report import capture_facts
from .collectives import collective_rows
from .schema import SCHEMA, ChipData, FigureData, Report

if TYPE_CHECKING:
    from ..result import CheckResult


def build_report(
    result: "CheckResult", *, options: JsonMapping | None = None, next_command: str = ""
) -> Report:
    """Return a check as the data that pages, traces and comparisons are made from.

    Args:
        result: The check.
        options: Compiler options that were set; by default those of the job.
        next_command: The command to run next.
    """
    compiled, prediction = result.compiled, result.prediction
    memory = compiled.memory
    about = compiled.to_dict()
    job_options: JsonMapping = {} if result.job is None else result.job.options
    report: Report = {
        "schema": SCHEMA,
        "verdict": "fits" if result.fits else "does not fit",
        "program": compiled.name,
        "job": None if result.job is None else result.job.to_dict(),
        "slice": compiled.slice.to_dict(),
        "chip": roofs_of(compiled.slice),
        "memory": about["memory"],
        "host_memory": None if result.host_memory is None else result.host_memory.to_dict(),
        "prediction": None,
        "no_prediction": result.no_prediction,
        "compile": {
            name: about[name]
            for name in ("compile_s", "stage", "from_cache", "flops_per_device", "code_bytes")
        },
        "operations": about["operations"],
        "versions": about["versions"],
        "options": dict(job_options if options is None else options),
        "fixes": None if result.fixes is None else result.fixes.to_dict()["fixes"],
        "next": next_command,
    }
    if result.captured is not None:
        report["capture"] = capture_facts(result)
    if prediction is not None:
        network = Network(
            Machine.of(compiled.slice),
            tuple(compiled.coordinates),
            tuple(compiled.slice_of_device),
        )
        schedule = parse_live_ranges(compiled.listings.live_ranges)
        report["prediction"] = prediction.to_dict()
        report["spans"] = [span.to_dict() for span in prediction.spans]
        report["live_memory"] = live_memory(memory.curve, schedule, prediction.spans)
        report["collectives"] = collective_rows(compiled.module, prediction.spans, network)
    return report


def roofs_of(target: Slice) -> ChipData:
    """Return the peak compute and memory bandwidth of one device."""
    chip = target.chip
    return {
        "name": chip.name,
        "peak_bf16_tflops": cast("FigureData", chip.per_device(chip.peak("bf16")).to_dict()),
        "hbm_gbps": cast("FigureData", chip.per_device(chip.hbm_gbps).to_dict()),
    }


def live_memory(
    curve: Sequence[tuple[int, int]], schedule: Schedule, spans: Sequence[TrackSpan]
) -> list[list[float]]:
    """Return (seconds, bytes) for each point of a memory curve, with loop bodies once.

    Args:
        curve: Positions in the schedule, each with its bytes.
        schedule: The instructions in schedule order.
        spans: When each instruction runs.
    """
    starts = {span.name: span.start_s for span in spans if span.track == "core"}
    clock: list[float] = []
    now = 0.0
    for name in schedule.instructions:
        # A loop's own entry may follow its body in the schedule, but time must not decrease.
        now = max(now, starts.get(name, now))
        clock.append(now)
    if not clock:
        return []
    return [[clock[min(position, len(clock) - 1)], float(amount)] for position, amount in curve]

"""Series, events, goodput and stragglers of one run, as the page takes them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import TPUValidationError
from ...records.attempts import RunAttempt, attempts_of
from ...records.events import Event
from ...records.lines import read_end
from ...runtime.run_files import LOG_FILE, METRICS_FILE
from ...runtime.run_tail import is_number
from ..readings import METRICS
from ..runs import Run
from ..runs.goodput import goodput_of
from ..runs.sampling import sample_records
from ..runs.series import Axis, Numbers, make_series

GOODPUT = "goodput"
CURVE_POINTS = 48
MOST_GOODPUTS = 80
MOST_EVENTS = 2000
LOG_BYTES, LOG_LINES = 16 << 10, 40
_UNITS = {
    "step_time_s": "s",
    "input_stall_s": "s",
    "mfu": "share",
    "tokens_per_s_per_chip": "tokens/s",
}
_QUIET = ("spent", "progress")  # many, and shown as goodput
# What a line says besides; the rest is in the figures of the run, or only the run's own business.
_WORTH_TELLING = (
    *("attempt", "slice", "reason", "signal", "change", "lost_steps", "text", "seen_by"),
)


@dataclass(frozen=True)
class Window:
    """The part of a series that is asked for."""

    points: int
    by: Axis
    start: float | None
    end: float | None
    process: int | None
    chip: int | None


def series_view(run: Run, metrics: Sequence[str], window: Window) -> dict[str, Any]:
    """Return metrics over steps or time; one that the run does not have says why."""
    return {
        "by": window.by,
        "series": [_series(run, metric, window) for metric in metrics],
        "metrics": [*run.metrics(), GOODPUT],
    }


def curve_view(run: Run, metric: str) -> dict[str, Any]:
    """Return a few values of a metric from all over a run, in a time that its length is no part of.

    Extremes between them are not seen, which `series_view` has.
    """
    records = sample_records(run.path / METRICS_FILE, CURVE_POINTS, inside=run.path)
    points = [(record.get("step"), record.get(metric)) for record in records]
    known = [(step, value) for step, value in points if is_number(step) and is_number(value)]
    return {
        "metric": metric,
        "x": [step for step, _ in known],
        "y": [value for _, value in known],
        "origin": "measured",
        "sampled": True,
    }


def _series(run: Run, metric: str, window: Window) -> dict[str, Any]:
    known = METRICS.get(metric)
    about: dict[str, Any] = {
        "metric": metric,
        "label": metric,
        "unit": _UNITS.get(metric, known.unit if known else ""),
        "meaning": known.meaning if known else "",
    }
    place: dict[str, Any] = {}
    if known and known.scope != "run":
        process, chip = window.process, window.chip
        if process is None:
            process, chip = _highest(run, metric)
        place = {"process": process, "chip": chip}
        where = f"process {process}" + ("" if chip is None else f", chip {chip}")
        about["label"] = f"{metric} of {where}"
    limits: dict[str, Any] = {"points": window.points, "start": window.start, "end": window.end}
    try:
        if metric == GOODPUT and GOODPUT not in run.metrics():
            times, shares = goodput_over_time(run.events())
            x = times if window.by == "time" else steps_at(run, times)
            found = make_series(metric, x, shares, by=window.by, **limits)
        else:
            found = run.series(metric, by=window.by, **limits, **place)
    except TPUValidationError as error:
        return {**about, "x": [], "y": [], "total": 0, "origin": "", "reason": str(error)}
    data = found.to_dict()
    known_values = any(value is not None for value in data["y"])
    reason = {} if known_values else {"reason": "the run wrote down no value of it in this range"}
    if window.by == "step":
        data["x"] = [int(x) if x == x else None for x in data["x"]]
    return {**data, **about, **reason}


def _highest(run: Run, metric: str) -> tuple[int, int | None]:
    """Return the chip with the highest value now: the one that is full first, or hottest."""
    values = [
        (sample.value, process, sample.chip)
        for (process, _), reading in run.readings().items()
        for sample in reading.samples
        if sample.metric == metric
    ]
    if not values:
        return 0, None
    _, process, chip = max(values, key=lambda one: one[0])
    return process, chip


def goodput_over_time(events: Sequence[Event]) -> tuple[Numbers, Numbers]:
    """Return the goodput of the whole run up to each time at which the run said how far it was."""
    said = [at for at, event in enumerate(events) if event.number("productive_s") is not None]
    chosen = said[:: max(1, -(-len(said) // MOST_GOODPUTS))]
    if said and chosen[-1] != said[-1]:
        chosen.append(said[-1])
    wanted, shares = set(chosen), list[float | None]()
    attempts: list[RunAttempt] = []
    for at, event in enumerate(events):  # once, however many are chosen
        if event.event == "attempt started":
            attempts += attempts_of([event])
        elif attempts:
            attempts[-1].add(event)
        if at in wanted:
            shares.append(goodput_of(attempts).share)
    times = np.array([events[at].time for at in chosen])
    return times, np.array([np.nan if one is None else one for one in shares])


def steps_at(run: Run, times: Numbers) -> Numbers:
    """Return the steps that the run had completed at some times, from its own events."""
    marks = [(one.time, one.number("step")) for one in run.events()]
    known = [(at, step) for at, step in marks if step is not None]
    if not known:
        return np.full(len(times), np.nan)
    return np.interp(times, [at for at, _ in known], [step for _, step in known])


def log_view(run: Run) -> dict[str, Any]:
    """Return the newest lines of train.log."""
    lines, _ = read_end(run.path / LOG_FILE, LOG_BYTES, inside=run.path)
    return {"lines": [line.decode(errors="replace") for line in lines[-LOG_LINES:]]}


def events_view(run: Run) -> dict[str, Any]:
    """Return what happened, the newest last; of the many lines about spending, none."""
    loud = [event for event in run.events() if event.event not in _QUIET]
    shown = loud[-MOST_EVENTS:]
    return {
        "events": [
            {
                "time": event.time,
                "event": event.event,
                "step": event.number("step"),
                "words": ", ".join(
                    f"{name.replace('_', ' ')} {value}"
                    for name, value in event.data.items()
                    if name in _WORTH_TELLING and value not in (None, "")
                ),
            }
            for event in shown
        ],
        "left_out": len(loud) - len(shown),
    }

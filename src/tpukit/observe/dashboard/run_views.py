"""Series, events, goodput and log of one run, as JSON for the page."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ...errors import TPUValidationError
from ...plain_data import JsonObject
from ...records.attempts import RunAttempt, attempts_of
from ...records.events import Event
from ...records.lines import is_number, try_read_end
from ...records.names import INPUT_STALL, LOG_FILE, METRICS_FILE, MFU, STEP, STEP_TIME, TOKENS_RATE
from ..readings import METRICS
from ..runs import Run
from ..runs.goodput import goodput_of
from ..runs.growing_file import sample_records
from ..runs.series import Axis, Numbers, make_series

GOODPUT = "goodput"
CURVE_POINTS = 48
MOST_GOODPUTS = 80
MOST_EVENTS = 2000
LOG_BYTES, LOG_LINES = 16 << 10, 40
_UNITS = {
    STEP_TIME: "s",
    INPUT_STALL: "s",
    MFU: "share",
    TOKENS_RATE: "tokens/s",
}
_QUIET = ("spent", "progress")  # many, and shown as goodput
# Event data to show; other data is in the figures of the run or of no interest.
_WORTH_TELLING = (
    *("attempt", "slice", "reason", "signal", "change", "lost_steps", "text", "seen_by"),
)


@dataclass(frozen=True)
class Window:
    """The requested part of a series."""

    points: int
    by: Axis
    start: float | None
    end: float | None
    process: int | None
    chip: int | None


def series_view(run: Run, metrics: Sequence[str], window: Window) -> JsonObject:
    """Return metrics over steps or time; a metric that the run lacks has a reason."""
    return {
        "by": window.by,
        "series": [_series(run, metric, window) for metric in metrics],
        "metrics": [*run.metrics(), GOODPUT],
    }


def curve_view(run: Run, metric: str) -> JsonObject:
    """Return a few values of a metric from all over a run, in constant time.

    It may miss extremes, which `series_view` keeps.
    """
    records = sample_records(run.path / METRICS_FILE, CURVE_POINTS, inside=run.path)
    points = [(record.get(STEP), record.get(metric)) for record in records]
    finite = [(step, value) for step, value in points if is_number(step) and is_number(value)]
    return {
        "metric": metric,
        "x": [step for step, _ in finite],
        "y": [value for _, value in finite],
        "origin": "measured",
        "sampled": True,
    }


def _series(run: Run, metric: str, window: Window) -> JsonObject:
    about_metric = METRICS.get(metric)
    about: JsonObject = {
        "metric": metric,
        "label": metric,
        "unit": _UNITS.get(metric, about_metric.unit if about_metric else ""),
        "meaning": about_metric.meaning if about_metric else "",
    }
    place: JsonObject = {}
    if about_metric and about_metric.scope != "run":
        process, chip = window.process, window.chip
        if process is None:
            process, chip = _highest(run, metric)
        place = {"process": process, "chip": chip}
        where = f"process {process}" + ("" if chip is None else f", chip {chip}")
        about["label"] = f"{metric} of {where}"
    limits: JsonObject = {"points": window.points, "start": window.start, "end": window.end}
    try:
        if metric == GOODPUT and GOODPUT not in run.metrics():
            times, shares = goodput_over_time(run.events())
            x = times if window.by == "time" else steps_at(run, times)
            series = make_series(metric, x, shares, by=window.by, **limits)
        else:
            series = run.series(metric, by=window.by, **limits, **place)
    except TPUValidationError as error:
        return {**about, "x": [], "y": [], "total": 0, "origin": "", "reason": str(error)}
    data = series.to_dict()
    known_values = any(value is not None for value in data["y"])
    reason = {} if known_values else {"reason": "the run recorded no value in this range"}
    if window.by == "step":
        data["x"] = [int(x) if x == x else None for x in data["x"]]
    return {**data, **about, **reason}


def _highest(run: Run, metric: str) -> tuple[int, int | None]:
    """Return process and chip with the highest newest value."""
    values = [
        (sample.value, process, sample.chip)
        for (process, _), reading in run.readings().items()
        for sample in reading.samples
        if sample.metric == metric
    ]
    if not values:
        return 0, None
    _, process, chip = max(values, key=lambda value: value[0])
    return process, chip


def goodput_over_time(events: Sequence[Event]) -> tuple[Numbers, Numbers]:
    """Return times and the goodput of the run up to each, at its progress events."""
    marked = [at for at, event in enumerate(events) if event.number("productive_s") is not None]
    chosen = marked[:: max(1, -(-len(marked) // MOST_GOODPUTS))]
    if marked and chosen[-1] != marked[-1]:
        chosen.append(marked[-1])
    chosen_set, shares = set(chosen), list[float | None]()
    attempts: list[RunAttempt] = []
    for at, event in enumerate(events):  # one pass, however many are chosen
        if event.event == "attempt started":
            attempts += attempts_of([event])
        elif attempts:
            attempts[-1].add(event)
        if at in chosen_set:
            shares.append(goodput_of(attempts).share)
    times = np.array([events[at].time for at in chosen])
    return times, np.array([np.nan if share is None else share for share in shares])


def steps_at(run: Run, times: Numbers) -> Numbers:
    """Return the completed steps at some times, interpolated from the run's events."""
    marks = [(event.time, event.number("step")) for event in run.events()]
    known = [(at, step) for at, step in marks if step is not None]
    if not known:
        return np.full(len(times), np.nan)
    return np.interp(times, [at for at, _ in known], [step for _, step in known])


def log_view(run: Run) -> JsonObject:
    """Return the newest lines of train.log."""
    lines, _ = try_read_end(run.path / LOG_FILE, LOG_BYTES, inside=run.path)
    return {"lines": [line.decode(errors="replace") for line in lines[-LOG_LINES:]]}


def events_view(run: Run) -> JsonObject:
    """Return the events, the newest last, without the many "spent" and "progress" lines."""
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

"""What can be asked of one run: for each name, which settings it takes and what it shows."""

import logging
import time
from collections.abc import Callable, Hashable
from typing import Any

from ..runs import Run
from .answers import encoded
from .chips import chips_view
from .figures import problem_view, summary_view
from .library import Library, WatchedRun
from .queries import Query
from .run_views import curve_view, events_view, log_view, series_view

logger = logging.getLogger(__name__)

LOOKED_AT_LEAST_EVERY_S = 15

View = Callable[[Run], Any]


def summary(name: str, one: WatchedRun) -> bytes:
    """Return how a run is doing, as JSON; a run that falls silent writes nothing that says so."""

    def make(run: Run) -> dict[str, Any]:
        found = summary_view(name, run)
        one.is_running = found["state"] == "running"
        return found

    moment = int(time.monotonic() / LOOKED_AT_LEAST_EVERY_S) if one.is_running else None
    return one.ends.answer("summary", (one.version, moment), make)


def look(library: Library) -> dict[str, bytes]:
    """Return how every run is doing, as JSON by name; one that cannot be read has its problem."""
    return {name: _summary_or_problem(name, one) for name, one in library.runs().items()}


def _summary_or_problem(name: str, one: WatchedRun) -> bytes:
    try:
        return summary(name, one)
    except Exception as error:
        if not one.is_reported:  # one odd run must not take the others down, nor fill the log
            one.is_reported = True
            logger.warning("the run %s cannot be summarised", name, exc_info=error)
        why = f"it cannot be summarised: unexpected {type(error).__name__}"
        return encoded(problem_view(name, one.path, why))


def answer_about(one: WatchedRun, what: str, query: Query) -> bytes:
    """Return one of `RUN_VIEWS`, as JSON."""
    asked, view = RUN_VIEWS[what](query)
    reader = one.whole if what in NEEDS_WHOLE else one.ends
    return reader.answer((what, asked), one.version, view)


def _series(query: Query) -> tuple[Hashable, View]:
    query.only("metrics", "points", "by", "start", "end", "process", "chip")
    metrics, window = query.metrics(), query.window()
    return (metrics, window), lambda run: series_view(run, metrics, window)


def _chips(query: Query) -> tuple[Hashable, View]:
    query.only("metric")
    metric = query.text("metric")
    return metric, lambda run: chips_view(run, metric)


def _curve(query: Query) -> tuple[Hashable, View]:
    query.only("metric")
    metric = query.needed("metric")
    return metric, lambda run: curve_view(run, metric)


def _plain(view: View) -> Callable[[Query], tuple[Hashable, View]]:
    def asked(query: Query) -> tuple[Hashable, View]:
        query.only()
        return None, view

    return asked


RUN_VIEWS: dict[str, Callable[[Query], tuple[Hashable, View]]] = {
    "series": _series,
    "curve": _curve,
    "events": _plain(events_view),
    "goodput": _plain(lambda run: run.goodput().to_dict()),
    "chips": _chips,
    "log": _plain(log_view),
    "stragglers": _plain(lambda run: run.stragglers().to_dict()),
}
NEEDS_WHOLE = ("series",)

"""What can be asked of one run: for each name, which settings it takes and what it shows."""

import time
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

from ..runs import Run
from .chips import chips_view
from .figures import summary_view
from .library import Library, WatchedRun
from .queries import Query
from .run_views import events_view, log_view, series_view

LOOKED_AT_LEAST_EVERY_S = 15

View = Callable[[Run], Any]


def summary(name: str, one: WatchedRun) -> bytes:
    """Return how a run is doing, as JSON; a run that falls silent writes nothing that says so."""
    moment = int(time.monotonic() / LOOKED_AT_LEAST_EVERY_S)
    return one.ends.answer(("summary", moment), one.version, partial(summary_view, name))


def look(library: Library) -> dict[str, bytes]:
    """Return how every run is doing, as JSON by name."""
    return {name: summary(name, one) for name, one in library.runs().items()}


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


def _plain(view: View) -> Callable[[Query], tuple[Hashable, View]]:
    def asked(query: Query) -> tuple[Hashable, View]:
        query.only()
        return None, view

    return asked


RUN_VIEWS: dict[str, Callable[[Query], tuple[Hashable, View]]] = {
    "series": _series,
    "events": _plain(events_view),
    "goodput": _plain(lambda run: run.goodput().to_dict()),
    "chips": _chips,
    "log": _plain(log_view),
    "stragglers": _plain(lambda run: run.stragglers().to_dict()),
}
NEEDS_WHOLE = ("series",)

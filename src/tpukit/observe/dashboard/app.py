"""The web application: pages, their files, and the JSON and events behind them."""

import json
import logging
import time
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from ...errors import TPUError
from ...pages.frame import FRAMED_HEADERS, asset
from ...plain_data import JsonMapping, JsonObject
from ..runs import Run
from .access import Guard, Token
from .answers import BadQuery, Query, answer, assets_folder, encoded, refusal
from .chips import chips_view
from .figures import compare_view, compared, problem_view, summary_view
from .library import Library, NotFound, WatchedRun
from .live import Pulse
from .run_views import curve_view, events_view, log_view, series_view

logger = logging.getLogger(__name__)

LOOKED_AT_LEAST_EVERY_S = 15

View = Callable[[Run], Any]


def summary(name: str, watched: WatchedRun) -> bytes:
    """Return the summary of a run as JSON; of a running one it is renewed now and then."""

    def make(run: Run) -> JsonObject:
        view = summary_view(name, run)
        watched.is_running = view["state"] == "running"
        return view

    moment = int(time.monotonic() / LOOKED_AT_LEAST_EVERY_S) if watched.is_running else None
    return watched.ends.answer("summary", (watched.version, moment), make)


def look(library: Library) -> dict[str, bytes]:
    """Return the summary of every run as JSON by name, or its problem."""
    return {name: _summary_or_problem(name, watched) for name, watched in library.runs().items()}


def _summary_or_problem(name: str, watched: WatchedRun) -> bytes:
    try:
        return summary(name, watched)
    except Exception as error:
        if not watched.is_reported:  # a damaged run must neither affect the others nor fill the log
            watched.is_reported = True
            logger.warning("the run %s cannot be summarised", name, exc_info=error)
        why = f"it cannot be summarised: unexpected {type(error).__name__}"
        return encoded(problem_view(name, watched.path, why))


def answer_about(watched: WatchedRun, what: str, query: Query) -> bytes:
    """Return one of `RUN_VIEWS`, as JSON."""
    settings, view = RUN_VIEWS[what](query)
    reader = watched.whole if what in NEEDS_WHOLE else watched.ends
    return reader.answer((what, settings), watched.version, view)


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
    def parse(query: Query) -> tuple[Hashable, View]:
        query.only()
        return None, view

    return parse


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


PAGES = ("fleet", "run", "chips", "plan", "compile", "compare")
DOCUMENTS = ("plan", "compile")
MOST_VIEWERS = 500
NO_FLEET: JsonMapping = {"pods": [], "costs": None, "problems": []}

Fleet = Callable[[], JsonMapping]


def make_app(
    library: Library,
    *,
    fleet: Fleet = lambda: NO_FLEET,
    token: Token | None = None,
    only_loopback: bool = True,
    pulse: Pulse | None = None,
) -> Guard:
    """Return the dashboard as an ASGI application.

    Args:
        library: The runs and documents.
        fleet: Returns pods and their costs; called in a thread for each request.
        token: The token that every request needs; None for none.
        only_loopback: Whether only host names of this machine are answered.
        pulse: Sends changes to viewers; made from the library by default.
    """
    api = _Api(library, fleet, pulse or Pulse(partial(look, library)))
    app = Starlette(
        routes=[
            *(Route(path, _index) for path in ("/", "/login", *(f"/{name}" for name in PAGES))),
            *(Route(f"/{kind}/page", partial(api.page, kind)) for kind in DOCUMENTS),
            *(Route(f"/api/{kind}", partial(api.document, kind)) for kind in DOCUMENTS),
            Route("/api/live", api.live),
            Route("/api/runs", api.runs),
            Route("/api/runs/{name:path}/{what}", api.run),
            Route("/api/fleet", api.fleet),
            Route("/api/compare", api.compare),
            Route("/assets/kit/pages.css", _kit_style),
            Mount("/assets", StaticFiles(directory=assets_folder())),
        ],
        exception_handlers={
            HTTPException: _on_http_error,
            NotFound: _on_not_found,
            BadQuery: _on_bad_query,
            TPUError: _on_error,
            Exception: _on_unforeseen,
        },
    )
    # The guard is outermost, so that Starlette's own error responses pass it too.
    return Guard(app, token=token, only_loopback=only_loopback)


class _Api:
    """The API of the pages. Functions without `async` run in threads."""

    def __init__(self, library: Library, fleet: Fleet, pulse: Pulse) -> None:
        self._library, self._fleet, self._pulse = library, fleet, pulse

    async def live(self, request: Request) -> Response:
        if self._pulse.viewers >= MOST_VIEWERS:
            return refusal(503, f"{MOST_VIEWERS} viewers are watching", "close some, or try later")
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        stream = self._pulse.follow()
        return StreamingResponse(stream, headers=headers, media_type="text/event-stream")

    def runs(self, request: Request) -> Response:
        Query(request.query_params).only()
        parts = b",".join(look(self._library).values())
        folders = encoded([str(folder) for folder in self._library.folders])
        return answer(b'{"runs":[%s],"folders":%s}' % (parts, folders))

    def run(self, request: Request) -> Response:
        name, what = request.path_params["name"], request.path_params["what"]
        watched, query = self._library.run(name), Query(request.query_params)
        if what == "summary":
            query.only()
            return answer(summary(name, watched))
        if what not in RUN_VIEWS:
            raise NotFound(f"a run has no {what!r:.40}; it has {', '.join(RUN_VIEWS)}")
        return answer(answer_about(watched, what, query))

    def fleet(self, request: Request) -> Response:
        Query(request.query_params).only()
        return answer(encoded(dict(self._fleet())))

    def compare(self, request: Request) -> Response:
        query = Query(request.query_params)
        query.only("a", "b")
        names = (query.needed("a"), query.needed("b"))
        runs = {name: self._library.run(name) for name in names}
        parts = [
            runs[name].ends.answer("compared", runs[name].version, partial(compared, name))
            for name in names
        ]
        return answer(encoded(compare_view(*map(json.loads, parts))))

    def document(self, kind: str, request: Request) -> Response:
        from .documents import read_document, row_of

        query = Query(request.query_params)
        query.only("file")
        name = query.text("file")
        if name is None:
            documents = self._library.documents(kind)
            return answer(encoded({"files": [row_of(*document) for document in documents.items()]}))
        return answer(encoded(read_document(self._library.document(kind, name))))

    def page(self, kind: str, request: Request) -> Response:
        from .documents import page_of

        query = Query(request.query_params)
        query.only("file")
        document = self._library.document(kind, query.needed("file"))
        return HTMLResponse(page_of(document), headers=dict(FRAMED_HEADERS))


async def _index(request: Request) -> Response:
    return FileResponse(assets_folder() / "index.html")


async def _kit_style(request: Request) -> Response:
    return Response(asset("tpukit.pages", "pages.css"), media_type="text/css")


def _on_not_found(request: Request, error: Exception) -> Response:
    return refusal(404, str(error), "GET /api/runs, /api/plan and /api/compile list what there is")


def _on_bad_query(request: Request, error: Exception) -> Response:
    return refusal(400, str(error), "correct it, and try again")


def _on_error(request: Request, error: Exception) -> Response:
    return refusal(422, str(error), "fix the file, or open another one")


def _on_http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    return refusal(status, f"there is nothing at {request.url.path!r:.80}", "begin at /")


def _on_unforeseen(request: Request, error: Exception) -> Response:
    way_out = "see the traceback where `tpukit dashboard` runs"
    return refusal(500, f"unexpected {type(error).__name__}", way_out)

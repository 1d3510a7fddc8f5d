"""The web application: pages, their files, and the JSON and events behind them."""

import json
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, HTMLResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from ...errors import TPUError
from ...pages.frame import asset
from ...pages.served import FRAMED_HEADERS
from .access import Guard, Token
from .answers import answer, assets_folder, encoded, refusal
from .compare import compare_view, compared
from .library import Library, NotFound
from .live import Pulse
from .queries import BadQuery, Query
from .run_api import RUN_VIEWS, answer_about, look, summary

PAGES = ("fleet", "run", "chips", "plan", "compile", "compare")
DOCUMENTS = ("plan", "compile")
MOST_VIEWERS = 500
NO_FLEET: Mapping[str, Any] = {"pods": [], "costs": None, "problems": []}

Fleet = Callable[[], Mapping[str, Any]]


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
        library: What the folders hold.
        fleet: Returns pods and what they cost; called in a thread for each request.
        token: What every request must know; None on a loopback address.
        only_loopback: Whether only names of this machine are answered.
        pulse: What tells viewers of changes; made of the library by default.
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
    # Around everything: what Starlette says of an error it did not foresee is guarded too.
    return Guard(app, token=token, only_loopback=only_loopback)


class _Api:
    """What the page asks for. Functions without `async` run in threads of their own."""

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
        one, query = self._library.run(name), Query(request.query_params)
        if what == "summary":
            query.only()
            return answer(summary(name, one))
        if what not in RUN_VIEWS:
            raise NotFound(f"a run has no {what!r:.40}; it has {', '.join(RUN_VIEWS)}")
        return answer(answer_about(one, what, query))

    def fleet(self, request: Request) -> Response:
        Query(request.query_params).only()
        return answer(encoded(dict(self._fleet())))

    def compare(self, request: Request) -> Response:
        query = Query(request.query_params)
        query.only("a", "b")
        names = (query.needed("a"), query.needed("b"))
        one, other = (self._library.run(name) for name in names)
        parts = [
            run.ends.answer("compared", run.version, partial(compared, name))
            for name, run in zip(names, (one, other), strict=True)
        ]
        return answer(encoded(compare_view(*map(json.loads, parts))))

    def document(self, kind: str, request: Request) -> Response:
        from .documents import read_document, row_of

        query = Query(request.query_params)
        query.only("file")
        name = query.text("file")
        if name is None:
            found = self._library.documents(kind)
            return answer(encoded({"files": [row_of(*one) for one in found.items()]}))
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
    return refusal(400, str(error), "change that, and ask again")


def _on_error(request: Request, error: Exception) -> Response:
    return refusal(422, str(error), "mend the file, or look at another one")


def _on_http_error(request: Request, error: Exception) -> Response:
    status = error.status_code if isinstance(error, HTTPException) else 500
    return refusal(status, f"there is nothing at {request.url.path!r:.80}", "begin at /")


def _on_unforeseen(request: Request, error: Exception) -> Response:
    way_out = "look at where `tpukit dashboard` runs: the traceback is there"
    return refusal(500, f"unexpected {type(error).__name__}", way_out)

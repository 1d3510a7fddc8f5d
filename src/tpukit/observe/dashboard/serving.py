"""Start the server: which address, whether it needs a token, and what is said about it."""

import asyncio
import contextlib
import os
import socket
import threading
import webbrowser
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ...errors import ConfigError, MissingExtraError, TPUValidationError
from ...runtime.address import is_loopback
from ...runtime.files import temporary_folder
from ...runtime.progress import Progress

try:
    import uvicorn

    from .access import MAKE_TOKEN, Token
    from .app import NO_FLEET, make_app
except ModuleNotFoundError as error:
    if str(error.name).startswith("tpukit"):
        raise
    raise MissingExtraError(
        "dashboard", needed_for="The dashboard", module=str(error.name)
    ) from error
from .library import Library, WatchedRun
from .live_hosts import LiveHosts

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from .app import Fleet

LOOPBACK = "127.0.0.1"
PORT = 8780
_SHUTDOWN_S = 1


def serve(
    folders: Sequence[Path],
    *,
    host: str = LOOPBACK,
    port: int = PORT,
    token: str | None = None,
    open_browser: bool = False,
    fleet: "Fleet" = lambda: NO_FLEET,
    live: Sequence[str] = (),
    progress: Progress,
) -> None:
    """Serve the dashboard until Ctrl-C.

    Args:
        folders: Where runs, plans and checks are.
        host: The address to listen on; one that others reach needs a token.
        port: 0 for any that is free.
        token: What viewers must know.
        open_browser: Whether to open a browser on this machine.
        fleet: Returns pods and what they cost.
        live: `host:port` of monitors to read as one more run.
        progress: Told the lines that a person needs.

    Raises:
        ConfigError: The address needs a token, or cannot be had.
        TPUValidationError: A folder is not there, or an address is none.
    """
    for folder in folders:
        if not folder.is_dir():
            raise TPUValidationError(
                f"{folder} is no folder; name one with runs in it, such as `runs`, or the run "
                "directory of `tpukit train --run-dir`."
            )
    known = None if token is None else Token(token)
    only_loopback = is_loopback(host)
    if known is None and not only_loopback:
        raise ConfigError(
            f"{host} can be reached by others, so the dashboard needs a token there: set "
            f"TPUKIT_DASHBOARD_TOKEN, or --token. `{MAKE_TOKEN}` makes one."
        )
    with (
        listening(host, port) as listener,
        temporary_folder("tpukit-live-") as kept,
        contextlib.ExitStack() as opened,
    ):
        if live:
            opened.callback(LiveHosts(live, kept).close)
        library = Library([*folders, kept])
        app = make_app(library, fleet=fleet, token=known, only_loopback=only_loopback)
        address = f"http://{_written(host)}:{listener.getsockname()[1]}/"
        progress(f"{address} shows {', '.join(map(str, folders))}; Ctrl-C ends it")
        if known is not None:
            progress("it asks for the token once in each browser")
        threading.Thread(target=_read_all, args=(library,), daemon=True).start()
        if open_browser:
            webbrowser.open(address)
        run_server(app, listener)


def run_server(app: "ASGIApp", listener: socket.socket) -> None:
    """Answer requests until the process ends."""
    asyncio.run(make_server(app).serve(sockets=[listener]))


def make_server(app: "ASGIApp") -> "uvicorn.Server":
    """Return a server that writes no line about requests, and leaves Ctrl-C to the command."""
    config = uvicorn.Config(
        app,
        access_log=False,
        date_header=False,
        lifespan="off",
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=_SHUTDOWN_S,
        ws="none",
    )
    return _Server(config)


class _Server(uvicorn.Server):
    """Does not catch signals: Ctrl-C ends a command at once, and a program as it likes."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


@contextlib.contextmanager
def listening(host: str, port: int) -> Generator[socket.socket]:
    """Take an address, or say who may have it.

    Raises:
        ConfigError: It cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host.strip("[]"), port), family=family, backlog=512)
    except OSError as error:
        raise ConfigError(
            f"{host} port {port} cannot be listened on ({os.strerror(error.errno or 0)}); choose "
            "another with --port, or 0 for any that is free."
        ) from error
    with listener:
        yield listener


def _read_all(library: Library) -> None:
    """Read every run once, the newest first, so that its first viewer need not wait for it."""
    for one in list(library.runs().values()):
        _read(one)


def _read(one: WatchedRun) -> None:
    with one.whole.lock:
        one.whole.run.metrics()


def _written(host: str) -> str:
    return f"[{host.strip('[]')}]" if ":" in host else host

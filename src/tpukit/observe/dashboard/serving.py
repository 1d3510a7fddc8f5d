"""Start the server: which address, whether it needs a token, and what is said about it."""

import asyncio
import contextlib
import os
import secrets
import socket
import threading
import webbrowser
from collections.abc import Generator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from ...errors import ConfigError, MissingExtraError, TPUValidationError
from ...runtime.accounts import people
from ...runtime.address import is_loopback
from ...runtime.files import temporary_folder
from ...runtime.progress import Progress

try:
    import uvicorn

    from .access import MAKE_TOKEN, Token
    from .app import NO_FLEET, make_app
    from .connections import BACKLOG, AcceptErrors, Connections, LimitedProtocol
except ModuleNotFoundError as error:
    if str(error.name).startswith("tpukit"):
        raise
    raise MissingExtraError(
        "dashboard", needed_for="The dashboard", module=str(error.name)
    ) from error
from .library import Library
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
    no_token: bool = False,
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
        token: What viewers must know; on a machine that several people use, one is made by default.
        no_token: Whether to make none there.
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
    only_loopback = is_loopback(host)
    is_made = token is None and only_loopback and not no_token and len(people()) > 1
    if is_made:
        token = secrets.token_urlsafe()
    known = None if token is None else Token(token)
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
        if is_made:
            progress(
                f"several people use this machine, so it needs a token: {address}login#{token}"
            )
        elif known is not None:
            progress("it asks for the token once in each browser")
        threading.Thread(target=_read_newest, args=(library,), daemon=True).start()
        if open_browser:
            webbrowser.open(_first_page(address, token, kept) if is_made and token else address)
        run_server(app, listener)


def run_server(app: "ASGIApp", listener: socket.socket) -> None:
    """Answer requests until the process ends."""
    asyncio.run(make_server(app).serve(sockets=[listener]))


def make_server(app: "ASGIApp", connections: "Connections | None" = None) -> "uvicorn.Server":
    """Return a server that writes no line about requests, and leaves Ctrl-C to the command.

    Args:
        app: What answers.
        connections: How many there may be, and how long a request may take to come.
    """
    limits = connections or Connections()
    config = uvicorn.Config(
        app,
        access_log=False,
        backlog=BACKLOG,
        date_header=False,
        http=cast("type[asyncio.Protocol]", partial(LimitedProtocol, limits)),
        lifespan="off",
        log_level="error",  # a warning per bad request would fill the log
        server_header=False,
        timeout_graceful_shutdown=_SHUTDOWN_S,
        ws="none",
    )
    return _Server(config)


class _Server(uvicorn.Server):
    """Does not catch signals: Ctrl-C ends a command at once, and a program as it likes."""

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(AcceptErrors())
        await super().serve(sockets)

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
        listener = socket.create_server((host.strip("[]"), port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"{host} port {port} cannot be listened on ({os.strerror(error.errno or 0)}); choose "
            "another with --port, or 0 for any that is free."
        ) from error
    with listener:
        yield listener


def _read_newest(library: Library) -> None:
    """Read the newest run, so that its first viewer need not wait for it."""
    for one in list(library.runs().values())[:1]:
        one.whole.load()


def _first_page(address: str, token: str, folder: Path) -> str:
    """Return a page that signs in; the token would be in the list of processes as an argument."""
    page = folder / "open.html"
    page.touch(mode=0o600)
    page.write_text(f'<meta http-equiv="refresh" content="0; url={address}login#{token}">\n')
    return page.as_uri()


def _written(host: str) -> str:
    return f"[{host.strip('[]')}]" if ":" in host else host

"""Start the dashboard's server: its address, its token, and its limits on connections.

A connection that sends half a request would keep a file open for ever, and a process at its limit
of open files accepts no connection. So a request must be complete within some seconds. With as many
connections as allowed, the one that has waited longest without a request is closed.
"""

import asyncio
import contextlib
import logging
import os
import resource
import secrets
import socket
import threading
import time
import webbrowser
from collections.abc import Generator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from ...errors import ConfigError, MissingExtraError, TPUValidationError
from ...plain_data import JsonObject
from ...runtime.address import is_loopback, people
from ...runtime.files import temporary_folder
from ...runtime.progress import Progress

try:
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    from .access import MAKE_TOKEN, Token
    from .app import NO_FLEET, make_app
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

logger = logging.getLogger(__name__)

LOOPBACK = "127.0.0.1"
PORT = 8780
_SHUTDOWN_S = 1
MOST_CONNECTIONS = 800
BACKLOG = 64
OTHER_FILES = 128
"""Files that the process may open besides connections."""
REQUEST_S = 10.0
"""Seconds for a complete request, from its connection or the response before it."""
REPORTED_EVERY_S = 60.0


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
        folders: Folders with runs, plans and checks.
        host: The address to listen on; an address that others can reach needs a token.
        port: Port to listen on; 0 for any free one.
        token: The viewers' token; on a machine with several users, one is made by default.
        no_token: Whether to make no token there.
        open_browser: Whether to open a browser on this machine.
        fleet: Returns pods and their costs.
        live: `host:port` of monitors to read as one more run.
        progress: Called with lines for the user.

    Raises:
        ConfigError: The address needs a token, or is not available.
        TPUValidationError: A folder does not exist, or an address is not valid.
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
    checked = None if token is None else Token(token)
    if checked is None and not only_loopback:
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
        app = make_app(library, fleet=fleet, token=checked, only_loopback=only_loopback)
        address = f"http://{_written(host)}:{listener.getsockname()[1]}/"
        progress(f"{address} shows {', '.join(map(str, folders))}; Ctrl-C ends it")
        if is_made:
            progress(
                f"this machine has several users, so a token is needed: {address}login#{token}"
            )
        elif checked is not None:
            progress("each browser is asked for the token once")
        threading.Thread(target=_read_newest, args=(library,), daemon=True).start()
        if open_browser:
            webbrowser.open(_first_page(address, token, kept) if is_made and token else address)
        run_server(app, listener)


def run_server(app: "ASGIApp", listener: socket.socket) -> None:
    """Answer requests until the process ends."""
    asyncio.run(make_server(app).serve(sockets=[listener]))


def make_server(app: "ASGIApp", connections: "Connections | None" = None) -> "uvicorn.Server":
    """Return a server without an access log, which leaves Ctrl-C to the command.

    Args:
        app: The application.
        connections: Limits on the number of connections and the time of a request.
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
    """A server that catches no signals, so that Ctrl-C ends the command at once."""

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        asyncio.get_running_loop().set_exception_handler(AcceptErrors())
        await super().serve(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


@contextlib.contextmanager
def listening(host: str, port: int) -> Generator[socket.socket]:
    """Listen on an address.

    Raises:
        ConfigError: The address is not available.
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
    """Read the newest run before its first viewer requests it."""
    for run in list(library.runs().values())[:1]:
        run.whole.load()


def _first_page(address: str, token: str, folder: Path) -> str:
    """Write a page that signs in, because a token in an argument would be in the process list."""
    page = folder / "open.html"
    page.touch(mode=0o600)
    page.write_text(f'<meta http-equiv="refresh" content="0; url={address}login#{token}">\n')
    return page.as_uri()


def _written(host: str) -> str:
    return f"[{host.strip('[]')}]" if ":" in host else host


class Connections:
    """The open connections of one server.

    Args:
        most: The most open connections; by default as many as the limit on open files allows.
        request_s: Seconds within which a request must be complete.
    """

    def __init__(self, most: int | None = None, *, request_s: float = REQUEST_S) -> None:
        self.most = _most_connections() if most is None else most
        self.request_s = request_s
        self.count = 0
        # Connections without a request, the one that has waited longest first.
        self._waiting: dict[LimitedProtocol, asyncio.TimerHandle] = {}

    def add(self, connection: "LimitedProtocol") -> None:
        """Add a connection; with too many, close the one that has waited longest."""
        self.count += 1
        self.wait(connection)
        if self.count > self.most:
            oldest = next(iter(self._waiting))
            self.stop_waiting(oldest)
            oldest.transport.abort()

    def wait(self, connection: "LimitedProtocol") -> None:
        """Start the time limit for a connection's next request."""
        self.stop_waiting(connection)
        self._waiting[connection] = connection.loop.call_later(
            self.request_s, connection.transport.abort
        )

    def stop_waiting(self, connection: "LimitedProtocol") -> None:
        """End the time limit, because a request has come."""
        if timer := self._waiting.pop(connection, None):
            timer.cancel()

    def remove(self, connection: "LimitedProtocol") -> None:
        """Remove a closed connection."""
        self.stop_waiting(connection)
        self.count -= 1


class LimitedProtocol(H11Protocol):
    """HTTP on one connection, with a time limit for its requests.

    Args:
        limits: The server's connections.
        **options: Of uvicorn's protocol.
    """

    def __init__(self, limits: Connections, **options: Any) -> None:
        super().__init__(**options)
        self._limits = limits

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  as uvicorn's
        """Add the connection, and wait for a request."""
        super().connection_made(transport)
        self._limits.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection."""
        super().connection_lost(exc)
        self._limits.remove(self)

    def handle_events(self) -> None:
        """Read data; complete headers end the time limit."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._limits.stop_waiting(self)

    def on_response_complete(self) -> None:
        """Wait for the next request, unless it has already come."""
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self._limits.wait(self)


class AcceptErrors:
    """Logs at most once per minute that the system refused to open connections."""

    def __init__(self) -> None:
        self._reported: float | None = None

    def __call__(self, loop: asyncio.AbstractEventLoop, context: JsonObject) -> None:
        """Handle an error of the event loop; other errors are handled as usual."""
        if "socket.accept()" not in str(context.get("message")):
            loop.default_exception_handler(context)
            return
        now = time.monotonic()
        if self._reported is None or now - self._reported >= REPORTED_EVERY_S:
            self._reported = now
            logger.warning("connections are refused: %s", context.get("exception"))


def _most_connections() -> int:
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed == resource.RLIM_INFINITY:
        return MOST_CONNECTIONS
    return max(8, min(MOST_CONNECTIONS, allowed - OTHER_FILES - BACKLOG))

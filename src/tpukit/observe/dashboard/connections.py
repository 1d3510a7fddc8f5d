"""Connections of the server: so many at once, each with a time limit for its request.

A connection that sends half a request would hold a file for ever, and a process that may open no
more files accepts no one. So a request must be complete within some seconds, and when there are as
many connections as allowed, the one that has waited longest without a request makes room.
"""

import asyncio
import logging
import resource
import time
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

logger = logging.getLogger(__name__)

MOST_CONNECTIONS = 800
BACKLOG = 64
OTHER_FILES = 128
"""Files that the process opens beside connections."""
REQUEST_S = 10.0
"""Seconds within which a request must be complete, from its connection or the answer before it."""
REPORTED_EVERY_S = 60.0


class Connections:
    """The open connections of one server.

    Args:
        most: How many may be open at once; by default as many as the process may open files for.
        request_s: Seconds within which a request must be complete.
    """

    def __init__(self, most: int | None = None, *, request_s: float = REQUEST_S) -> None:
        self.most = _most_connections() if most is None else most
        self.request_s = request_s
        self.count = 0
        # Those that no request is answered on, the one that has waited longest first.
        self._waiting: dict[LimitedProtocol, asyncio.TimerHandle] = {}

    def add(self, one: "LimitedProtocol") -> None:
        """Take a new connection; with too many, close the one that has waited longest."""
        self.count += 1
        self.wait(one)
        if self.count > self.most:
            oldest = next(iter(self._waiting))
            self.stop_waiting(oldest)
            oldest.transport.abort()

    def wait(self, one: "LimitedProtocol") -> None:
        """Give a connection its seconds for the next request."""
        self.stop_waiting(one)
        self._waiting[one] = one.loop.call_later(self.request_s, one.transport.abort)

    def stop_waiting(self, one: "LimitedProtocol") -> None:
        """Note that a request has come."""
        if timer := self._waiting.pop(one, None):
            timer.cancel()

    def remove(self, one: "LimitedProtocol") -> None:
        """Forget a connection that is closed."""
        self.stop_waiting(one)
        self.count -= 1


class LimitedProtocol(H11Protocol):
    """HTTP on one connection, whose requests must come in time.

    Args:
        limits: The connections of the server that it belongs to.
        **options: Of uvicorn's protocol.
    """

    def __init__(self, limits: Connections, **options: Any) -> None:
        super().__init__(**options)
        self._limits = limits

    def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]  as uvicorn's
        """Begin to wait for a request."""
        super().connection_made(transport)
        self._limits.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """End it."""
        super().connection_lost(exc)
        self._limits.remove(self)

    def handle_events(self) -> None:
        """Read what came; with its headers complete, a request is answered."""
        before = self.cycle
        super().handle_events()
        if self.cycle is not before:
            self._limits.stop_waiting(self)

    def on_response_complete(self) -> None:
        """Wait for the next request, unless it is there already."""
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self._limits.wait(self)


class AcceptErrors:
    """Reports in one line a minute that the system refused to open connections."""

    def __init__(self) -> None:
        self._reported: float | None = None

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Handle what an event loop reports; every other error as usual."""
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

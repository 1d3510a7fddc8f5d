"""A hand on the fate of an emulated cloud: HTTP with JSON on loopback, for people and scripts.

```
curl localhost:PORT                                           what there is, and who holds it
curl localhost:PORT/preempt -d '{"name": "my-job-a1", "notice_s": 10}'
curl localhost:PORT/maintain -d '{"name": "my-job-a1", "in_s": 60}'
curl localhost:PORT/fail -d '{"name": "my-job-a1", "reason": "no more capacity"}'
curl localhost:PORT/sell-out -d '{"zone": "us-east5-b", "kind": "v6e", "for_s": 600}'
curl localhost:PORT/restock -d '{"zone": "us-east5-b", "kind": "v6e"}'
curl localhost:PORT/fault -d '{"mishap": "lost_reply", "calls": "Create*", "times": 2}'
curl localhost:PORT/advance -d '{"seconds": 3600}'            a clock that is driven
```
"""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Protocol

from .clock import DrivenClock
from .faults import Fault, Faults, Mishap
from .holding import Holding
from .world import World

LARGEST_BODY = 1 << 16


class Cloud(Protocol):
    """What an emulated API has, in its own names."""

    world: World

    def full_name(self, name: str) -> str | None:
        """Return the full name of what is called so, or None."""
        ...

    def preempt(self, name: str, *, node: int | None, notice_s: float | None) -> bool:
        """Take something away, or one node of it; tell whether there was one to take."""
        ...


class Orders(Protocol):
    """What an emulator can be told, by path, and what it shows."""

    by_path: dict[str, Callable[..., object]]

    def shown(self) -> dict[str, Any]:
        """What there is, and who holds it."""
        ...


class OrderPort:
    """Takes orders on a port of 127.0.0.1."""

    def __init__(self, orders: Orders, *, port: int = 0) -> None:
        class Handler(_Handler):
            pass

        Handler.orders = orders
        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self.address = f"localhost:{self._server.server_port}"
        # Polls for its end, which should not take long.
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        """Take no further orders."""
        self._server.shutdown()
        self._server.server_close()


class ControlPort(OrderPort):
    """Takes orders for a cloud on a port of 127.0.0.1."""

    def __init__(self, cloud: Cloud, faults: Faults, *, port: int = 0) -> None:
        super().__init__(_Orders(cloud, faults), port=port)


class _Orders:
    """What can be told, by path."""

    def __init__(self, cloud: Cloud, faults: Faults) -> None:
        self._cloud, self._world, self._faults = cloud, cloud.world, faults
        self.by_path: dict[str, Callable[..., object]] = {
            "/preempt": self._preempt,
            "/maintain": self._maintain,
            "/fail": self._fail,
            "/sell-out": self._world.sell_out,
            "/restock": self._world.restock,
            "/fault": self._fault,
            "/advance": self._advance,
        }

    def shown(self) -> dict[str, Any]:
        """What there is, and who holds it."""
        return {
            "now": self._world.clock.now(),
            "free": {
                zone: {kind: self._world.free(zone, kind) for kind in has.capacity}
                for zone, has in self._world.zones.items()
            },
            "holdings": [_shown(held) for held in self._world.holdings()],
        }

    def _full(self, name: str) -> str:
        full = self._cloud.full_name(name)
        if full is None:
            raise LookupError(f"nothing is called {name!r}")
        return full

    def _preempt(self, name: str, node: int | None = None, notice_s: float | None = None) -> bool:
        return self._cloud.preempt(self._full(name), node=node, notice_s=notice_s)

    def _maintain(self, name: str, in_s: float = 0.0, lasts_s: float = 3600.0) -> bool:
        return self._world.announce_maintenance(self._full(name), in_s=in_s, lasts_s=lasts_s)

    def _fail(self, name: str, reason: str) -> bool:
        return self._world.fail_start(self._full(name), reason)

    def _fault(self, mishap: str, **rule: Any) -> None:
        self._faults.add(Fault(Mishap(mishap), **rule))

    def _advance(self, seconds: float) -> None:
        if not isinstance(self._world.clock, DrivenClock):
            raise LookupError("this clock runs by itself")
        self._world.clock.advance(seconds)


class _Handler(BaseHTTPRequestHandler):
    """One request. Pages of browsers are kept out: a name that is not loopback's is refused."""

    orders: Orders

    def do_GET(self) -> None:
        self._reply(200, self.orders.shown())

    def do_POST(self) -> None:
        order = self.orders.by_path.get(self.path)
        host = self.headers.get("Host", "").rsplit(":", 1)[0]
        if host not in ("localhost", "127.0.0.1") or self.headers.get("Origin"):
            return self._reply(403, {"error": "from this machine alone"})
        if order is None:
            return self._reply(404, {"error": f"orders are {', '.join(self.orders.by_path)}"})
        length = min(int(self.headers.get("Content-Length", 0)), LARGEST_BODY)
        try:
            done = order(**json.loads(self.rfile.read(length) or b"{}"))
        except (LookupError, TypeError, ValueError) as error:
            return self._reply(400, {"error": str(error)})
        return self._reply(200, {"done": done is not False})

    def _reply(self, status: int, content: dict[str, Any]) -> None:
        body = json.dumps(content, indent=1).encode() + b"\n"
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def _shown(held: Holding) -> dict[str, Any]:
    return {
        "name": held.name,
        "stage": held.stage.value,
        "kind": held.kind,
        "amount": held.amount,
        "spot": held.spot,
        "reason": held.reason,
    }

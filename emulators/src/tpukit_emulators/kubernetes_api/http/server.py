"""The HTTPS server: who may ask, what goes wrong on the way, and which form an answer has.

One thread serves everybody: every answer that takes time waits without holding it.
"""

import asyncio
import json
import ssl
import threading
import weakref
from collections.abc import AsyncGenerator
from contextlib import suppress
from enum import StrEnum
from functools import partial
from typing import Any

import yaml
from aiohttp import web

from ...faults import Faults, Mishap
from ..cluster import Cluster
from ..kinds import Kind
from ..refusal import Refusal
from ..store import Object
from . import discovery, streams
from .executing import execute
from .protobuf import read_object
from .requests import Call, read_call
from .tables import table
from .verbs import Verbs

_TABLE = "as=Table"
_LARGEST_BODY_BYTES = 3 << 20
FAREWELL_S = 0.02  # for the loop to close what was aborted


class Role(StrEnum):
    """What the bearer of a token may do."""

    ADMIN = "admin"
    VIEWER = "viewer"
    NOBODY = "nobody"

    def may(self, verb: str) -> bool:
        """Whether it may do this to any object."""
        if self is Role.VIEWER:
            return verb in ("get", "list", "watch")
        return self is Role.ADMIN


class ApiServer:
    """Shows a cluster on a loopback port.

    Args:
        cluster: What is shown.
        tls: Certificate and key.
        tokens: Who may ask, by bearer token.
        faults: What goes wrong with calls, named as in "create jobsets".
        bookmark_s: How often watches that want bookmarks get one.
        port: Where it listens; 0: anywhere.
    """

    def __init__(
        self,
        cluster: Cluster,
        *,
        tls: ssl.SSLContext,
        tokens: dict[str, Role],
        faults: Faults,
        bookmark_s: float = 30.0,
        port: int = 0,
    ) -> None:
        self._cluster = cluster
        self._verbs = Verbs(cluster)
        self._tls = tls
        self.tokens = tokens
        self._faults = faults
        self._bookmark_s = bookmark_s
        self._asked_port = port
        self._started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._stopping: asyncio.Event = asyncio.Event()
        self._transports: weakref.WeakSet[asyncio.Transport] = weakref.WeakSet()
        self.port = 0
        self._failure: OSError | None = None
        self._thread = threading.Thread(target=self._run, name="emulated-api", daemon=True)
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            raise self._failure

    @property
    def address(self) -> str:
        """Where it is."""
        return f"https://127.0.0.1:{self.port}"

    def close(self) -> None:
        """Stop serving."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._serve())
        finally:
            self._started.set()
            self._loop.close()

    async def _serve(self) -> None:
        app = web.Application(client_max_size=_LARGEST_BODY_BYTES)
        app.router.add_route("*", "/{path:.*}", self._answer)
        runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", self._asked_port, ssl_context=self._tls)
        try:
            await site.start()
        except OSError as error:
            self._failure = error
            return
        self.port = runner.addresses[0][1]
        self._started.set()
        await self._stopping.wait()
        await runner.cleanup()
        # TLS would wait for the other side to say goodbye, and clients keep connections open.
        for transport in list(self._transports):
            transport.abort()
        await asyncio.sleep(FAREWELL_S)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.transport is not None:
            self._transports.add(request.transport)
        try:
            role = self._role(request)
            path = request.path.rstrip("/")
            call = read_call(request.method, path, dict(request.query), self._cluster.installed)
            if call is None:
                return _json(await self._about(request, role))
            if not role.may(call.verb):
                raise _forbidden(call, role)
            fault = self._faults.strike(str(call))
            if fault and fault.mishap is Mishap.OUTAGE:
                raise Refusal(503, "the server is currently unable to handle the request")
            if fault and fault.mishap is Mishap.SLOW:
                await asyncio.sleep(fault.pause_s)
            answer = await self._carry_out(call, request)
            if fault and fault.mishap is Mishap.LOST_REPLY and request.transport is not None:
                request.transport.abort()
            return answer
        except Refusal as refusal:
            return _json(refusal.to_status(), refusal.code)

    def _role(self, request: web.Request) -> Role:
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        if scheme != "Bearer" or token not in self.tokens:
            raise Refusal(401, "Unauthorized")
        return self.tokens[token]

    async def _about(self, request: web.Request, role: Role) -> Any:
        """Answer what is no object: versions, discovery, OpenAPI, health, reviews of access."""
        path = request.path.rstrip("/")
        parts = path.split("/")[1:]
        installed = self._cluster.installed
        match parts:
            case ["version"]:
                return discovery.VERSION
            case ["api"]:
                return discovery.api_versions(f"127.0.0.1:{self.port}")
            case ["apis"]:
                return discovery.group_list(installed)
            case ["api", "v1"]:
                return discovery.resource_list("", "v1", installed)
            case ["apis", group] if any(group == name for name, _ in discovery.groups(installed)):
                return discovery.group_entry(group, installed)
            case ["apis", group, version] if (group, version) in discovery.groups(installed):
                return discovery.resource_list(group, version, installed)
            case ["openapi", "v3"]:
                return discovery.openapi_index(installed)
            case ["openapi", "v3", "api", "v1"]:
                return discovery.openapi_document("", "v1", installed)
            case ["openapi", "v3", "apis", group, version]:
                return discovery.openapi_document(group, version, installed)
            case ["healthz" | "livez" | "readyz"]:
                return {"status": "ok"}
            case _:
                raise Refusal(404, "the server could not find the requested resource")

    async def _carry_out(self, call: Call, request: web.Request) -> web.StreamResponse:
        wants_table = _TABLE in request.headers.get("Accept", "")
        verbs, store = self._verbs, self._cluster.store
        now = self._cluster.clock.now()
        if call.verb == "watch":
            show = partial(_as_table, call.kind, now) if wants_table else _itself
            lines = streams.watch(
                self._cluster, call, verbs.matching(call), show, bookmark_s=self._bookmark_s
            )
            return await self._stream(request, lines, "application/json")
        if call.verb == "get" and call.part == "log":
            lines = streams.log(self._cluster, call, verbs.get(call))
            return await self._stream(request, lines, "text/plain")
        if call.part == "exec":
            return await execute(self._cluster, call, request, verbs.get(call))
        if call.verb == "get":
            one = verbs.get(call)
            version = one["metadata"]["resourceVersion"]
            return _json(table(call.kind, [one], version=version, now=now) if wants_table else one)
        if call.verb == "list":
            found, metadata = verbs.list(call)
            if wants_table:
                shown = table(call.kind, found, version=metadata["resourceVersion"], now=now)
                shown["metadata"] |= metadata
                return _json(shown)
            return _json(
                {
                    "kind": f"{call.kind.name}List",
                    "apiVersion": call.api_version,
                    "metadata": metadata,
                    "items": found,
                }
            )
        body = await _body(request)
        if call.verb == "patch":
            return _json(verbs.patch(call, request.content_type, body))
        if not isinstance(body, dict):
            raise Refusal(400, "the body of the request is no object")
        if call.verb == "create":
            return _json(verbs.create(call, body), 201)
        if call.verb == "update":
            return _json(verbs.update(call, body))
        if call.verb == "delete":
            gone = verbs.delete(call, body)
            is_there = store.find(call.kind, call.namespace or "", call.name or "")
            return _json(gone if is_there else _success(call, gone))
        if call.verb == "deletecollection":
            verbs.delete_all(call, body)
            return _json({"kind": "Status", "apiVersion": "v1", "status": "Success"})
        raise Refusal(405, f"the server does not allow {request.method} here")

    async def _stream(
        self, request: web.Request, lines: AsyncGenerator[bytes], content_type: str
    ) -> web.StreamResponse:
        """Send lines as they come, until they end, the client goes or the server stops."""
        response = web.StreamResponse(headers={"Content-Type": content_type})
        stopping = asyncio.ensure_future(self._stopping.wait())
        line: asyncio.Future[bytes] | None = None
        try:
            await response.prepare(request)
            while True:
                line = asyncio.ensure_future(anext(lines))
                await asyncio.wait({line, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if not line.done():
                    break
                try:
                    await response.write(line.result())
                except StopAsyncIteration:
                    break
            await response.write_eof()
        except ConnectionError:
            pass  # nobody reads it any more
        finally:
            stopping.cancel()
            if line is not None and not line.done():
                line.cancel()
                with suppress(asyncio.CancelledError, StopAsyncIteration):
                    await line
            await lines.aclose()
        return response


def _as_table(kind: Kind, now: float, one: Object) -> Object:
    return table(kind, [one], version=one["metadata"]["resourceVersion"], now=now)


def _itself(one: Object) -> Object:
    return one


def _json(content: Any, code: int = 200) -> web.Response:
    return web.Response(
        body=json.dumps(content).encode(), status=code, content_type="application/json"
    )


def _success(call: Call, gone: Object) -> Object:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Success",
        "details": {
            "name": call.name,
            "group": call.kind.group,
            "kind": call.kind.plural,
            "uid": gone["metadata"]["uid"],
        },
    }


def _forbidden(call: Call, role: Role) -> Refusal:
    group = f' in API group "{call.kind.group}"'
    where = f' in the namespace "{call.namespace}"' if call.namespace else " at the cluster scope"
    return Refusal(
        403,
        f'{call.kind} is forbidden: User "{role}" cannot {call.verb} resource '
        f'"{call.kind.plural}"{group}{where}',
        details={"group": call.kind.group, "kind": call.kind.plural},
    )


async def _body(request: web.Request) -> Any:
    if "protobuf" in request.content_type:
        return read_object(await request.read())
    text = await request.text()
    if not text:
        return {}
    try:
        if "yaml" in request.content_type:
            return yaml.safe_load(text)
        return json.loads(text)
    except (ValueError, yaml.YAMLError) as error:
        raise Refusal(400, f"the body of the request cannot be read: {error}") from None

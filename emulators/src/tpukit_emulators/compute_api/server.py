"""The HTTP server: who calls is known by a token, and mishaps strike as they are told."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Collection
from functools import cached_property
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, urlsplit

from ..faults import Fault, Faults, Mishap
from ..identity import Account, Accounts, NotAuthenticated
from ..tpu_api.cloud import Machines
from ..world import World
from .cloud import Cloud
from .methods import Method, recorded_methods
from .offers import ZONES
from .refusals import Json, Refused
from .resources import MODELS
from .service import Call, ComputeService
from .tokens import NoGrant, TokenDesk

AUDIENCE = "https://compute.googleapis.com/"
PROJECT = "rehearsal"
TOKEN_PATH = "/token"
_WHO_ARE_YOU = (
    "Request had invalid authentication credentials. Expected OAuth 2 access token, login cookie "
    "or other valid authentication credential."
)


class ComputeAPI:
    """An emulated Compute Engine API on a loopback port.

    Attributes:
        endpoint: What a client takes as `api_endpoint`, and a job as `launch.endpoint`.
        owner: An account that may do everything; `owner.key_file` is its key.
    """

    def __init__(
        self,
        folder: Path,
        *,
        world: World | None = None,
        machines: Machines | None = None,
        project: str = PROJECT,
        port: int = 0,
        bulk_models: Collection[str] = MODELS,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.project = project
        self.world = world or World(ZONES)
        self.faults = Faults(self.world.seed)
        self.cloud = Cloud(self.world, machines, bulk_models)
        self._service = ComputeService(self.cloud, project)
        self._server = _Server(("127.0.0.1", port), _Handler)
        self._server.api = self
        self.port = self._server.server_port
        self.endpoint = f"http://127.0.0.1:{self.port}"
        token_uri = f"{self.endpoint}{TOKEN_PATH}"
        self.accounts = Accounts(folder, project, AUDIENCE, token_uri=token_uri)
        self.desk = TokenDesk(self.accounts)
        self.owner = self.accounts.add("owner")
        self.calls = 0
        self._counting = threading.Lock()
        threading.Thread(
            target=self._server.serve_forever, args=(0.05,), name="compute-api", daemon=True
        ).start()

    def close(self) -> None:
        """Stop answering, and drop who is connected."""
        self._server.shutdown()
        self._server.server_close()
        self._server.drop_all()

    @cached_property
    def _methods(self) -> list[Method]:
        return recorded_methods()

    def answer(self, verb: str, address: str, authorization: str | None, content: bytes) -> Json:
        """Answer a call.

        Raises:
            Refused: As the API refuses it.
            NoReply: It was carried out, and its caller must not hear of it.
        """
        with self._counting:
            self.calls += 1
        parts = urlsplit(address)
        method, variables = self._method(verb, parts.path)
        account = self._admit(method, variables, authorization)
        fault = self.faults.strike(method.full_name)
        if fault is not None:
            _suffer(fault)
        try:
            body = json.loads(content) if content else {}
        except ValueError as error:
            raise Refused(400, "parseError", "Parse Error") from error
        query = dict(parse_qsl(parts.query))
        reply = self._service.answer(Call(method, variables, query, account.email, body))
        if fault is not None and fault.mishap is Mishap.LOST_REPLY:
            raise NoReply
        return reply

    def _method(self, verb: str, path: str) -> tuple[Method, dict[str, str]]:
        for method in self._methods:
            if method.verb == verb and (found := method.path.fullmatch(path)):
                return method, found.groupdict()
        raise Refused(404, "notFound", f"The requested URL {path} was not found on this server.")

    def _admit(
        self, method: Method, variables: dict[str, str], authorization: str | None
    ) -> Account:
        try:
            account = self.desk.verify(authorization)
        except NotAuthenticated as error:
            raise Refused(401, "authError", _WHO_ARE_YOU) from error
        if not account.is_allowed(method.permission):
            raise Refused(
                403,
                "forbidden",
                f"Required '{method.permission}' permission for 'projects/{variables['project']}'",
            )
        return account


class NoReply(Exception):
    """The connection breaks before the reply is sent."""


def _suffer(fault: Fault) -> None:
    if fault.mishap is Mishap.OUTAGE:
        raise Refused(503, "backendError", "Backend Error")
    if fault.mishap is Mishap.SLOW:
        time.sleep(fault.pause_s)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    api: ComputeAPI

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._open: set[socket.socket] = set()
        self._opening = threading.Lock()
        super().__init__(address, handler)

    def process_request(self, request: object, client_address: object) -> None:
        with self._opening:
            self._open.add(request)  # pyright: ignore[reportArgumentType]
        super().process_request(request, client_address)  # pyright: ignore[reportArgumentType]

    def shutdown_request(self, request: object) -> None:
        with self._opening:
            self._open.discard(request)  # pyright: ignore[reportArgumentType]
        super().shutdown_request(request)  # pyright: ignore[reportArgumentType]

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of connections that break; everything else is answered."""

    def drop_all(self) -> None:
        """Break the connections that clients keep open."""
        with self._opening:
            for one in self._open:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # a reply is one packet, or a client waits for the second
    disable_nagle_algorithm = True
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]  whose handler it is

    def do_GET(self) -> None:
        self._handle()

    def do_POST(self) -> None:
        self._handle()

    def do_DELETE(self) -> None:
        self._handle()

    def do_PATCH(self) -> None:
        self._handle()

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""

    def _handle(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        try:
            if self.path == TOKEN_PATH:
                fields = dict(parse_qsl(content.decode()))
                granted = self.server.api.desk.grant(
                    fields.get("grant_type", ""), fields.get("assertion", "")
                )
                self._reply(200, granted)
                return
            authorization = self.headers.get("Authorization")
            self._reply(
                200, self.server.api.answer(self.command, self.path, authorization, content)
            )
        except NoGrant as error:
            self._reply(400, error.to_body())
        except Refused as refused:
            self._reply(refused.status, refused.to_body())
        except NoReply:
            self.close_connection = True

    def _reply(self, status: int, body: Json) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json; charset=UTF-8")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

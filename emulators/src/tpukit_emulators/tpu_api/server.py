"""The gRPC server: who calls is known by a token over TLS, and mishaps strike as they are told."""

import re
import threading
import time
from collections.abc import Callable, Mapping
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc

from ..faults import Faults, Mishap
from ..holding import Zone
from ..identity import Accounts, Authority, NotAuthenticated
from ..world import World
from .cloud import Cloud, Machines
from .methods import Method, recorded_methods
from .operations import Operations
from .resources import Refused
from .service import TPUService
from .versions import VERSIONS, Version

AUDIENCE = "https://tpu.googleapis.com/"
PROJECT = "rehearsal"
THREADS = 16
# Some of where Cloud TPUs are: https://cloud.google.com/tpu/docs/regions-zones.
ZONES: Mapping[str, Zone] = {
    "us-central1-a": Zone({"v2": 128, "v3": 128, "v5e": 256, "v5p": 256}),
    "us-central2-b": Zone({"v4": 1024}),
    "us-east1-d": Zone({"v6e": 256}),
    "us-east5-a": Zone({"v5p": 1024, "v6e": 256}),
    "us-east5-b": Zone({"v6e": 1024}),
    "europe-west4-a": Zone({"v2": 512, "v3": 1024, "v6e": 512}),
    "europe-west4-b": Zone({"v5e": 512, "v5p": 512}),
}
# google.auth's own words are longer; these are the API's.
_WHO_ARE_YOU = (
    "Request had invalid authentication credentials. Expected OAuth 2 access token, login cookie "
    "or other valid authentication credential."
)
_WORDS = re.compile(r"[A-Z][a-z]*")


class TPUAPI:
    """An emulated Cloud TPU API on a loopback port.

    Attributes:
        endpoint: What a client takes as `api_endpoint`, and a job as `launch.endpoint`.
        root_file: The authority to trust: `GRPC_DEFAULT_SSL_ROOTS_FILE_PATH`.
        owner: An account that may do everything; `owner.key_file` is its key.
    """

    def __init__(
        self,
        folder: Path,
        *,
        authority: Authority | None = None,
        world: World | None = None,
        machines: Machines | None = None,
        project: str = PROJECT,
        port: int = 0,
    ) -> None:
        self.project = project
        self.world = world or World(ZONES)
        self.faults = Faults(self.world.seed)
        self.cloud = Cloud(self.world, machines)
        authority = authority or Authority(folder)
        self.root_file = authority.root_file
        folder.mkdir(parents=True, exist_ok=True)
        self.accounts = Accounts(folder, project, AUDIENCE)
        self.owner = self.accounts.add("owner")
        self._calls = 0
        self._counting = threading.Lock()
        operations = Operations(self.world.clock)
        service = TPUService(self.cloud, operations, project)
        self._server = grpc.server(
            futures.ThreadPoolExecutor(THREADS, thread_name_prefix="tpu-api"),
            options=[("grpc.so_reuseport", 0)],  # a port that is taken is an error
        )
        for version in VERSIONS:
            self._serve(version, service, operations)
        credentials = grpc.ssl_server_credentials([authority.certify_loopback()])
        self.port = self._server.add_secure_port(f"127.0.0.1:{port}", credentials)
        self.endpoint = f"localhost:{self.port}"
        self._server.start()

    @property
    def calls(self) -> int:
        """How many calls have come in."""
        return self._calls

    def close(self) -> None:
        """Stop answering."""
        self._server.stop(grace=None).wait(5)

    def _serve(self, version: Version, service: TPUService, operations: Operations) -> None:
        by_service: dict[str, dict[str, Any]] = {}
        for method in recorded_methods(version.module):
            home = operations if method.service.endswith(".Operations") else service
            by_service.setdefault(method.service, {})[method.name] = (
                grpc.unary_unary_rpc_method_handler(
                    self._handler(method, getattr(home, method.name, None), version),
                    request_deserializer=method.request.FromString,
                    response_serializer=_serialized,
                )
            )
        # Services that all versions share are added twice; gRPC takes the first.
        for name, handlers in by_service.items():
            self._server.add_generic_rpc_handlers(
                (grpc.method_handlers_generic_handler(name, handlers),)
            )

    def _handler(
        self, method: Method, do: Callable[[Any, Version], Any] | None, version: Version
    ) -> Callable[[Any, grpc.ServicerContext], Any]:
        permission = _permission(method.name)

        def handle(request: Any, context: grpc.ServicerContext) -> Any:
            with self._counting:
                self._calls += 1
            try:
                self._admit(context, permission)
                fault = self.faults.strike(method.name)
                if fault is not None and fault.mishap is Mishap.OUTAGE:
                    raise Refused(
                        grpc.StatusCode.UNAVAILABLE, "The service is currently unavailable."
                    )
                if fault is not None and fault.mishap is Mishap.SLOW:
                    time.sleep(fault.pause_s)
                if do is None:
                    raise Refused(grpc.StatusCode.UNIMPLEMENTED, f"{method.name} is not emulated")
                reply = version.show(do(version.read(request), version))
                if fault is not None and fault.mishap is Mishap.LOST_REPLY:
                    raise Refused(grpc.StatusCode.UNAVAILABLE, "Socket closed")
                return reply
            except Refused as refused:
                return context.abort(refused.code, refused.message)

        return handle

    def _admit(self, context: grpc.ServicerContext, permission: str) -> None:
        metadata = dict(context.invocation_metadata())
        try:
            account = self.accounts.verify(str(metadata.get("authorization", "")))
        except NotAuthenticated as error:
            raise Refused(grpc.StatusCode.UNAUTHENTICATED, _WHO_ARE_YOU) from error
        if not account.is_allowed(permission):
            raise Refused(
                grpc.StatusCode.PERMISSION_DENIED,
                f"Permission '{permission}' denied on resource "
                f"'//tpu.googleapis.com/projects/{self.project}' (or it may not exist).",
            )


def _serialized(reply: Any) -> bytes:
    return reply.SerializeToString()


def _permission(method: str) -> str:
    """`tpu.queuedresources.create` for CreateQueuedResource."""
    verb, *noun = _WORDS.findall(method)
    plural = "".join(noun).lower()
    return f"tpu.{plural if plural.endswith('s') else plural + 's'}.{verb.lower()}"

"""Which methods the API has, recorded from the installed client itself, so they cannot drift.

The client's transport is given a channel that only writes down what it is asked for: path, type of
the request, type of the reply.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from google.auth.credentials import AnonymousCredentials
from google.cloud.location import locations_pb2
from google.longrunning import operations_pb2

# Properties of a transport that are not methods of the API.
_NOT_METHODS = frozenset({"grpc_channel", "operations_client", "kind", "host"})
# Services that every Google API shares; their requests are plain protobuf.
_SHARED: dict[str, ModuleType] = {
    "google.longrunning.Operations": operations_pb2,
    "google.cloud.location.Locations": locations_pb2,
}


@dataclass(frozen=True)
class Method:
    """One method of a service, with the protobuf class of its requests."""

    service: str
    name: str
    request: Any


class _Recorder:
    """A channel that connects to nobody."""

    def __init__(self) -> None:
        self.serializers: dict[str, Any] = {}

    def unary_unary(
        self, path: str, request_serializer: Any = None, **ignored: object
    ) -> Callable[..., None]:
        self.serializers[path] = request_serializer
        return lambda *arguments, **keywords: None


def recorded_methods(version: ModuleType) -> list[Method]:
    """Return the methods that the client of a version of the API calls.

    Args:
        version: `google.cloud.tpu_v2` or `google.cloud.tpu_v2alpha1`.
    """
    kind = version.services.tpu.transports.TpuGrpcTransport
    recorder = _Recorder()
    # A callable, not a channel: a channel would have to be a real one of gRPC.
    transport = kind(
        channel=lambda *arguments, **keywords: recorder, credentials=AnonymousCredentials()
    )
    # Stubs are made lazily, through an interceptor that hides their serializers.
    transport._logged_channel = recorder
    transport._stubs.clear()
    for name in dir(kind):
        if isinstance(getattr(kind, name, None), property) and name not in _NOT_METHODS:
            getattr(transport, name)
    methods: list[Method] = []
    for path, serializer in recorder.serializers.items():
        _, service, name = path.split("/")
        if service in _SHARED:
            request = getattr(_SHARED[service], f"{name}Request")
        else:
            request = serializer.__self__.pb()  # of the proto-plus class it is bound to
        methods.append(Method(service, name, request))
    return methods

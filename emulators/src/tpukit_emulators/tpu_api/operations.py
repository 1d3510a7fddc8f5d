"""Long-running operations: one service for all versions of the API.

The reply inside an operation must be a message of the version that started it, or the client
refuses it.
"""

import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc
from google.longrunning import operations_pb2
from google.protobuf import empty_pb2

from ..clock import Clock
from .paging import page_of
from .resources import Refused
from .versions import Version

KEPT = 10_000


@dataclass(frozen=True)
class Operation:
    """Something that was begun.

    Attributes:
        outcome: The message it ends with, or None while it goes on.
    """

    name: str
    target: str
    verb: str
    version: Version
    begun_at: float
    outcome: Callable[[], Any]


class Operations:
    """All operations, as the service `google.longrunning.Operations` shows them."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._operations: dict[str, Operation] = {}
        self._lock = threading.Lock()

    def begin(
        self, verb: str, target: str, version: Version, outcome: Callable[[], Any]
    ) -> Operation:
        """Note something that was begun on a resource."""
        parent = "/".join(target.split("/")[:4])
        name = f"{parent}/operations/operation-{uuid.uuid4().hex}"
        begun = Operation(name, target, verb, version, self._clock.now(), outcome)
        with self._lock:
            self._operations[name] = begun
            while len(self._operations) > KEPT:
                del self._operations[next(iter(self._operations))]
        return begun

    def show(self, operation: Operation) -> operations_pb2.Operation:
        """Return an operation as it stands."""
        shown = operations_pb2.Operation(name=operation.name)
        metadata = operation.version.message("OperationMetadata")(
            target=operation.target, verb=operation.verb, api_version=operation.version.name
        )
        metadata.create_time.FromNanoseconds(int(operation.begun_at * 1e9))
        shown.metadata.Pack(metadata)
        outcome = operation.outcome()
        if outcome is not None:
            shown.done = True
            shown.response.Pack(operation.version.show(outcome))
        return shown

    # The methods of the service.

    def GetOperation(self, request: Any, version: Version) -> Any:  # noqa: D102 - the API's
        return self.show(self._get(request.name))

    def ListOperations(self, request: Any, version: Version) -> Any:  # noqa: D102
        with self._lock:
            inside = sorted(
                name for name in self._operations if name.startswith(f"{request.name}/")
            )
        names, token = page_of(inside, request.page_size, request.page_token)
        shown = [self.show(self._get(name)) for name in names]
        return operations_pb2.ListOperationsResponse(operations=shown, next_page_token=token)

    def DeleteOperation(self, request: Any, version: Version) -> Any:  # noqa: D102
        self._get(request.name)
        with self._lock:
            self._operations.pop(request.name, None)
        return empty_pb2.Empty()

    def CancelOperation(self, request: Any, version: Version) -> Any:  # noqa: D102
        self._get(request.name)
        raise Refused(grpc.StatusCode.UNIMPLEMENTED, "Operations of this API cannot be cancelled")

    def _get(self, name: str) -> Operation:
        if (found := self._operations.get(name)) is None:
            raise Refused(grpc.StatusCode.NOT_FOUND, f"Operation '{name}' was not found")
        return found

"""Google's client with our patience: every call has a deadline, and every error a way out.

`insert()` and `delete()` of the client give futures that ask Google's own endpoint how it goes,
whatever endpoint the client has. So the forms with `_unary` are called, and operations are looked
at through clients that share the endpoint.
"""

import threading
import time
import uuid
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, TypeVar

from google.api_core import exceptions
from google.cloud import compute_v1

from ....errors import CommunicationTimeout, TPUError
from ....job.sections import LaunchSettings
from ...pod import Host
from ..google.project import HOST_KEYS, GoogleProject
from .failures import API_ERRORS, NotReady, explained, failure_of, is_silence

PATIENCE_S = 4.0
"""How long one question may take with all its calls: errors come within 5 s."""
PAUSES_S = (0.1, 0.3, 0.6)
"""Before each further try, where nobody answered."""
LOOKS_S = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Between looks at an operation; the last is repeated."""
AT_ONCE = 10
"""Calls at the same time: so many connections each client keeps, and it complains of more."""
OPERATION_S = 120.0
"""How long something that was begun may take."""
PAGE = 500
DONE = compute_v1.Operation.Status.DONE
T = TypeVar("T")


class ComputeEngine(GoogleProject):
    """The Compute Engine API for one project.

    Args:
        launch: Project, credentials and endpoint.
    """

    default_endpoint = compute_v1.InstancesClient.DEFAULT_ENDPOINT

    def __init__(self, launch: LaunchSettings) -> None:
        super().__init__(launch)
        self._slots = threading.BoundedSemaphore(AT_ONCE)

    # Credentials are passed by hand, always: without them a client would look for some.

    @cached_property
    def templates(self) -> compute_v1.InstanceTemplatesClient:
        """Instance templates."""
        return compute_v1.InstanceTemplatesClient(**self._options)

    @cached_property
    def policies(self) -> compute_v1.ResourcePoliciesClient:
        """Workload policies."""
        return compute_v1.ResourcePoliciesClient(**self._options)

    @cached_property
    def groups(self) -> compute_v1.InstanceGroupManagersClient:
        """Managed instance groups."""
        return compute_v1.InstanceGroupManagersClient(**self._options)

    @cached_property
    def instances(self) -> compute_v1.InstancesClient:
        """Machines."""
        return compute_v1.InstancesClient(**self._options)

    @cached_property
    def machine_types(self) -> compute_v1.MachineTypesClient:
        """Machine types."""
        return compute_v1.MachineTypesClient(**self._options)

    @cached_property
    def reservations(self) -> compute_v1.ReservationsClient:
        """Capacity that is set apart."""
        return compute_v1.ReservationsClient(**self._options)

    @cached_property
    def zones(self) -> compute_v1.ZonesClient:
        """Zones."""
        return compute_v1.ZonesClient(**self._options)

    @cached_property
    def regions(self) -> compute_v1.RegionsClient:
        """Regions, with their quotas."""
        return compute_v1.RegionsClient(**self._options)

    @cached_property
    def zone_operations(self) -> compute_v1.ZoneOperationsClient:
        """What was begun in a zone."""
        return compute_v1.ZoneOperationsClient(**self._options)

    @cached_property
    def region_operations(self) -> compute_v1.RegionOperationsClient:
        """What was begun in a region."""
        return compute_v1.RegionOperationsClient(**self._options)

    @cached_property
    def global_operations(self) -> compute_v1.GlobalOperationsClient:
        """What was begun elsewhere."""
        return compute_v1.GlobalOperationsClient(**self._options)

    @property
    def _options(self) -> dict[str, Any]:
        return {
            "credentials": self.identity.credentials,
            "client_options": {"api_endpoint": self.endpoint},
        }

    def ask(self, call: Callable[[float], T]) -> T:
        """Make a call that may be made twice, and make it again where nobody answers.

        Args:
            call: Takes the seconds it may last.

        Raises:
            ProviderError: Nobody answers, or whoever asks is refused.
        """
        deadline = time.monotonic() + PATIENCE_S
        pauses_s = iter(PAUSES_S)
        while True:
            try:
                with self._slots:
                    return call(max(0.2, deadline - time.monotonic()))
            except API_ERRORS as error:
                pause_s = next(pauses_s, None) if is_silence(error) else None
                if pause_s is None or time.monotonic() + pause_s > deadline:
                    raise self._explained(error) from error
            time.sleep(pause_s)

    def find(self, call: Callable[..., T], **named: object) -> T | None:
        """Return what a `get` of the client returns, or None where there is nothing."""

        def look(timeout_s: float) -> T | None:
            try:
                return call(project=self.project, retry=None, timeout=timeout_s, **named)
            except exceptions.NotFound:
                return None

        return self.ask(look)

    def host_keys(self, host: Host, *, zone: str) -> "list[str]":
        """Return the ssh keys that a host has published in its guest attributes; none before."""
        request = compute_v1.GetGuestAttributesInstanceRequest(
            project=self.project, zone=zone, instance=host.name, query_path=HOST_KEYS
        )

        def call(timeout_s: float) -> list[str]:
            try:
                reply = self.instances.get_guest_attributes(request, retry=None, timeout=timeout_s)
            except exceptions.NotFound:
                return []
            return [f"{item.key} {item.value}" for item in reply.query_value.items]

        return self.ask(call)

    def list_all(self, call: Callable[..., Any], request: Any) -> "list[Any]":
        """Return everything that a `list` of the client goes through, page by page."""
        request.project, request.max_results = self.project, PAGE
        return self.ask(lambda timeout_s: list(call(request, retry=None, timeout=timeout_s)))

    def begin(
        self, call: Callable[..., compute_v1.Operation], request: Any
    ) -> compute_v1.Operation | None:
        """Begin to make or remove something; None where it is there, or gone, already.

        A lost reply is asked for again with the same id. Every call has an id of its own: one that
        follows from a name would still be known when the name is used again, and nothing be made.
        """
        request.project, request.request_id = self.project, str(uuid.uuid4())

        def send(timeout_s: float) -> compute_v1.Operation | None:
            try:
                return call(request, retry=None, timeout=timeout_s)
            except (exceptions.Conflict, exceptions.NotFound) as error:
                is_insert = type(request).__name__.startswith("Insert")
                if isinstance(error, exceptions.Conflict) is not is_insert:
                    raise
                return None

        deadline = time.monotonic() + OPERATION_S
        while True:
            try:
                return self.ask(send)
            except NotReady:  # someone else makes the same thing at the same time
                if time.monotonic() > deadline:
                    raise
                time.sleep(LOOKS_S[2])

    def finish(
        self, operation: compute_v1.Operation | None, *, within_s: float = OPERATION_S
    ) -> None:
        """Wait until what was begun is done.

        Raises:
            TPUError: It failed.
            CommunicationTimeout: It is not done by then; it goes on.
        """
        deadline = time.monotonic() + within_s
        pauses_s: Iterator[float] = iter(LOOKS_S)
        while operation is not None and operation.status != DONE:
            if time.monotonic() > deadline:
                raise CommunicationTimeout(
                    f"{operation.operation_type} of {operation.target_link} is not done after "
                    f"{within_s:g} s; it goes on by itself."
                )
            time.sleep(next(pauses_s, LOOKS_S[-1]))
            operation = self._look(operation)
        if operation is not None and (failure := failure_of(operation)) is not None:
            raise failure

    def _look(self, operation: compute_v1.Operation) -> compute_v1.Operation | None:
        if operation.zone:
            zone = operation.zone.rsplit("/", 1)[1]
            return self.find(self.zone_operations.get, zone=zone, operation=operation.name)
        if operation.region:
            region = operation.region.rsplit("/", 1)[1]
            return self.find(self.region_operations.get, region=region, operation=operation.name)
        return self.find(self.global_operations.get, operation=operation.name)

    def _explained(self, error: Exception) -> TPUError:
        return explained(error, source=self.identity.source, endpoint=self.endpoint)

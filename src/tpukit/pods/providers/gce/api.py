"""The Compute Engine client, with a deadline for every call and an explained error.

The client's `insert()` and `delete()` return futures that always poll Google's own endpoint. So
their `_unary` forms are called here, and operations are polled through clients with the configured
endpoint.
"""

import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any, TypeVar

import requests
from google.api_core import exceptions
from google.auth import exceptions as auth_exceptions
from google.cloud import compute_v1

from ....errors import (
    CommunicationTimeout,
    ConfigError,
    PodUnavailable,
    ProviderError,
    ProviderSilent,
    TPUError,
)
from ....job.sections import LaunchSettings
from ....runtime.google_credentials import WAY_OUT
from ...causes import Cause
from ...pod import Host
from ..google import HOST_KEYS, GoogleProject, UnknownZone

ZONES_PAGE = "https://cloud.google.com/compute/docs/regions-zones"
_CALL = re.compile(r"^[A-Z]+ https?://\S+: ")
_ZONE = re.compile(r"'zone': '([^']+)'|/zones/([^/']+)' was not found")
# Error codes of machines that could not be created, by cause; other codes do not go away by
# waiting. Grouped as in SkyPilot (sky/provision/gcp, @147db0f6).
_CAPACITY = (
    "ZONE_RESOURCE_POOL_EXHAUSTED",
    "RESOURCE_POOL_EXHAUSTED",
    "insufficientCapacity",
    "UNSUPPORTED_OPERATION",  # preempted during creation
    "RESOURCE_NOT_READY",
    "RESOURCE_OPERATION_RATE_EXCEEDED",
)
_QUOTA = ("QUOTA_EXCEEDED", "quotaExceeded")
_SLOW_DOWN = ("rateLimitExceeded", "userRateLimitExceeded")
_SILENT = (
    exceptions.ServiceUnavailable,
    exceptions.BadGateway,
    exceptions.GatewayTimeout,
    exceptions.InternalServerError,
    exceptions.TooManyRequests,
    requests.ConnectionError,
    requests.Timeout,
)


class NotReady(ConfigError):
    """A needed resource is still being created or removed."""


def is_silence(error: Exception) -> bool:
    """Return whether no answer came, so that the call may or may not have taken effect."""
    return isinstance(error, _SILENT) or _reason(error) in _SLOW_DOWN


def explained(error: Exception, *, source: str, endpoint: str) -> TPUError:
    """Translate an error of the client to tpukit's.

    Args:
        error: The client's error.
        source: Source of the credentials.
        endpoint: The client's endpoint.
    """
    text = _CALL.sub("", str(getattr(error, "message", None) or error).splitlines()[0])
    if isinstance(error, auth_exceptions.GoogleAuthError):
        why = text.split("('", 1)[-1].split("'", 1)[0]
        return ProviderError(f"No token is available with {source} ({why}); {WAY_OUT}.")
    if isinstance(error, exceptions.Unauthorized):
        return ProviderError(
            f"Compute Engine does not accept the credentials of {source}: they are wrong or "
            f"expired, or this machine's clock is wrong; {WAY_OUT}."
        )
    if is_silence(error):
        return ProviderSilent(
            f"The Compute Engine API at {endpoint} does not answer ({_silence(error, text)}); "
            "check the network, a proxy, or launch.endpoint."
        )
    if _reason(error) in _QUOTA:
        return PodUnavailable(f"Compute Engine has no capacity: {text}", cause=Cause.QUOTA.value)
    if isinstance(error, exceptions.Forbidden):
        return ProviderError(
            f"Compute Engine refuses {source}: {text}. Ask for the role "
            "roles/compute.instanceAdmin.v1 in the project, and check launch.project."
        )
    if (zone := _ZONE.search(text)) is not None:
        return UnknownZone(zone[1] or zone[2], who="Compute Engine", listed_at=ZONES_PAGE)
    if _reason(error) == "resourceNotReady":
        return NotReady(f"Compute Engine is still busy: {text}; try again later.")
    if isinstance(error, exceptions.ClientError):
        return ConfigError(
            f"Compute Engine refuses the request: {text}. `tpukit pods preflight` lists what it "
            "offers."
        )
    return ProviderError(f"Compute Engine failed: {text}.")


def failure_of(operation: compute_v1.Operation) -> TPUError | None:
    """Return the error of a failed operation, or None."""
    errors = list(operation.error.errors)
    if errors:
        first = errors[0]
        if (cause := cause_of(first.code)) is not None:
            return PodUnavailable(
                f"Compute Engine has no capacity: {error_text(errors)}", cause=cause.value
            )
        return ConfigError(f"Compute Engine failed: {error_text(errors)}")
    if operation.http_error_status_code:
        return ProviderError(
            f"Compute Engine failed: {operation.http_error_status_code} "
            f"{operation.http_error_message}."
        )
    return None


def cause_of(code: str) -> Cause | None:
    """Return the cause if machines are unavailable, or None for other errors."""
    if code in _QUOTA:
        return Cause.QUOTA
    return Cause.STOCKOUT if code.startswith(_CAPACITY) else None


def error_text(errors: Iterable[compute_v1.Errors]) -> str:
    """Return the messages of a list of errors, without duplicates."""
    return " ".join(dict.fromkeys(f"{error.message} ({error.code})" for error in errors))


def _reason(error: Exception) -> str:
    errors = getattr(error, "errors", None) or [{}]
    first = errors[0]
    return str(first.get("reason", "")) if isinstance(first, dict) else ""


def _silence(error: Exception, text: str) -> str:
    if isinstance(error, requests.Timeout):
        return "it took too long"
    return type(error).__name__ if isinstance(error, requests.ConnectionError) else text


LOOKS_S = (0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
"""Pauses between polls of an operation; the last one is repeated."""
AT_ONCE = 10
"""Number of concurrent calls, which is also each client's limit on open connections."""
OPERATION_S = 120.0
"""Time limit of an operation."""
PAGE = 500
DONE = compute_v1.Operation.Status.DONE
T = TypeVar("T")
C = TypeVar("C")


def _client(kind: Callable[..., C]) -> "cached_property[C]":
    # Credentials are always passed explicitly, because a client would search for others.
    def make(api: "ComputeEngine") -> C:
        return kind(
            credentials=api.identity.credentials, client_options={"api_endpoint": api.endpoint}
        )

    return cached_property(make)


class ComputeEngine(GoogleProject):
    """The Compute Engine API for one project.

    Args:
        launch: Has the project, credentials and endpoint.
    """

    default_endpoint = compute_v1.InstancesClient.DEFAULT_ENDPOINT

    def __init__(self, launch: LaunchSettings) -> None:
        super().__init__(launch)
        self._slots = threading.BoundedSemaphore(AT_ONCE)

    templates = _client(compute_v1.InstanceTemplatesClient)
    policies = _client(compute_v1.ResourcePoliciesClient)
    groups = _client(compute_v1.InstanceGroupManagersClient)
    instances = _client(compute_v1.InstancesClient)
    machine_types = _client(compute_v1.MachineTypesClient)
    reservations = _client(compute_v1.ReservationsClient)
    zones = _client(compute_v1.ZonesClient)
    regions = _client(compute_v1.RegionsClient)
    zone_operations = _client(compute_v1.ZoneOperationsClient)
    region_operations = _client(compute_v1.RegionOperationsClient)
    global_operations = _client(compute_v1.GlobalOperationsClient)

    def ask(self, call: Callable[[float], T], *, deadline: float | None = None) -> T:
        """Make an idempotent call, and retry it while no answer comes."""

        def limited(timeout_s: float) -> T:
            with self._slots:
                return call(timeout_s)

        return super().ask(limited, deadline=deadline)

    def find(self, call: Callable[..., T], **named: object) -> T | None:
        """Return the result of a `get` of the client, or None if the resource does not exist."""

        def get(timeout_s: float) -> T | None:
            try:
                return call(project=self.project, retry=None, timeout=timeout_s, **named)
            except exceptions.NotFound:
                return None

        return self.ask(get)

    def host_keys(self, host: Host, *, zone: str) -> "list[str]":
        """Return the ssh keys that a host has published in its guest attributes, if any."""
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
        """Return all results of a `list` of the client, from all pages."""
        request.project, request.max_results = self.project, PAGE
        return self.ask(lambda timeout_s: list(call(request, retry=None, timeout=timeout_s)))

    def begin(
        self, call: Callable[..., compute_v1.Operation], request: Any
    ) -> compute_v1.Operation | None:
        """Start to create or remove a resource; return None if that is already done.

        After a lost reply the call is repeated with the same request id. Each call has a new id,
        because the API would still know an id derived from a reused name, and create nothing.
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
            except NotReady:  # another caller creates the same resource now
                if time.monotonic() > deadline:
                    raise
                time.sleep(LOOKS_S[2])

    def finish(
        self, operation: compute_v1.Operation | None, *, within_s: float = OPERATION_S
    ) -> None:
        """Wait until an operation is done.

        Raises:
            TPUError: The operation failed.
            CommunicationTimeout: The operation is not done in time, and continues.
        """
        deadline = time.monotonic() + within_s
        pauses_s: Iterator[float] = iter(LOOKS_S)
        while operation is not None and operation.status != DONE:
            if time.monotonic() > deadline:
                raise CommunicationTimeout(
                    f"{operation.operation_type} of {operation.target_link} is not done after "
                    f"{within_s:g} s; it continues."
                )
            time.sleep(next(pauses_s, LOOKS_S[-1]))
            operation = self._poll(operation)
        if operation is not None and (failure := failure_of(operation)) is not None:
            raise failure

    def _poll(self, operation: compute_v1.Operation) -> compute_v1.Operation | None:
        if operation.zone:
            zone = operation.zone.rsplit("/", 1)[1]
            return self.find(self.zone_operations.get, zone=zone, operation=operation.name)
        if operation.region:
            region = operation.region.rsplit("/", 1)[1]
            return self.find(self.region_operations.get, region=region, operation=operation.name)
        return self.find(self.global_operations.get, operation=operation.name)

    def is_silence(self, error: Exception) -> bool:
        """Return whether no answer came."""
        return is_silence(error)

    def explain(self, error: Exception) -> TPUError:
        """Translate an error of the client to tpukit's."""
        return explained(error, source=self.identity.source, endpoint=self.endpoint)

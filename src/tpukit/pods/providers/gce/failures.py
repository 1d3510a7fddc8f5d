"""What Compute Engine's errors mean here: no capacity, no quota, a wrong word, nobody there.

An error comes as the status of a call, inside an operation that had begun, or in what a group says
of the machines it cannot make. The client reads only the status of an operation, so one that has
`error.errors` alone looks like a success to it; both are read here.
"""

import re
from collections.abc import Iterable

import requests
from google.api_core import exceptions
from google.auth import exceptions as auth_exceptions
from google.cloud import compute_v1

from ....errors import ConfigError, PodUnavailable, ProviderError, TPUError
from ....runtime.google_credentials import WAY_OUT
from ...causes import Cause
from ..google.zones import UnknownZone

ZONES_PAGE = "https://cloud.google.com/compute/docs/regions-zones"
_CALL = re.compile(r"^[A-Z]+ https?://\S+: ")
_ZONE = re.compile(r"'zone': '([^']+)'|/zones/([^/']+)' was not found")
# Codes of machines that could not be made, by what helps; others will not go away by waiting.
# As SkyPilot tells them apart (sky/provision/gcp, @147db0f6).
_CAPACITY = (
    "ZONE_RESOURCE_POOL_EXHAUSTED",
    "RESOURCE_POOL_EXHAUSTED",
    "insufficientCapacity",
    "UNSUPPORTED_OPERATION",  # preempted while it was made
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
API_ERRORS = (
    exceptions.GoogleAPICallError,
    auth_exceptions.GoogleAuthError,
    requests.RequestException,
)


class NotReady(ConfigError):
    """What is needed is still being made, or removed."""


def is_silence(error: Exception) -> bool:
    """Tell whether nobody answered, so that the call may have been carried out or not."""
    return isinstance(error, _SILENT) or _reason(error) in _SLOW_DOWN


def explained(error: Exception, *, source: str, endpoint: str) -> TPUError:
    """Return the error of tpukit for one of the client's.

    Args:
        error: What the client raised.
        source: Where the credentials came from.
        endpoint: Whom the client talked to.
    """
    said = _CALL.sub("", str(getattr(error, "message", None) or error).splitlines()[0])
    if isinstance(error, auth_exceptions.GoogleAuthError):
        why = said.split("('", 1)[-1].split("'", 1)[0]
        return ProviderError(f"No token could be had with {source} ({why}); {WAY_OUT}.")
    if isinstance(error, exceptions.Unauthorized):
        return ProviderError(
            f"Compute Engine does not accept the credentials of {source}: they are wrong or "
            f"expired, or this machine's clock is; {WAY_OUT}."
        )
    if is_silence(error):
        return ProviderError(
            f"The Compute Engine API at {endpoint} does not answer ({_silence(error, said)}); "
            "check the network, a proxy, or launch.endpoint."
        )
    if _reason(error) in _QUOTA:
        return PodUnavailable(f"Compute Engine has none to give: {said}", cause=Cause.QUOTA.value)
    if isinstance(error, exceptions.Forbidden):
        return ProviderError(
            f"Compute Engine refuses {source}: {said}. Ask for the role "
            "roles/compute.instanceAdmin.v1 in the project, and check launch.project."
        )
    if (zone := _ZONE.search(said)) is not None:
        return UnknownZone(zone[1] or zone[2], who="Compute Engine", listed_at=ZONES_PAGE)
    if _reason(error) == "resourceNotReady":
        return NotReady(f"Compute Engine is still at it: {said}; ask again later.")
    if isinstance(error, exceptions.ClientError):
        return ConfigError(
            f"Compute Engine refuses the request: {said}. `tpukit pods preflight` lists what it "
            "offers."
        )
    return ProviderError(f"Compute Engine failed: {said}.")


def failure_of(operation: compute_v1.Operation) -> TPUError | None:
    """Return why an operation failed, or None where it did not."""
    errors = list(operation.error.errors)
    if errors:
        first = errors[0]
        if (cause := cause_of(first.code)) is not None:
            return PodUnavailable(
                f"Compute Engine has none to give: {words_of(errors)}", cause=cause.value
            )
        return ConfigError(f"Compute Engine could not do it: {words_of(errors)}")
    if operation.http_error_status_code:
        return ProviderError(
            f"Compute Engine could not do it: {operation.http_error_status_code} "
            f"{operation.http_error_message}."
        )
    return None


def cause_of(code: str) -> Cause | None:
    """Return why machines are not to be had, or None where it is not for want of them."""
    if code in _QUOTA:
        return Cause.QUOTA
    return Cause.STOCKOUT if code.startswith(_CAPACITY) else None


def words_of(errors: Iterable[compute_v1.Errors]) -> str:
    """Return what a list of errors says, each thing once."""
    return " ".join(dict.fromkeys(f"{one.message} ({one.code})" for one in errors))


def _reason(error: Exception) -> str:
    found = getattr(error, "errors", None) or [{}]
    first = found[0]
    return str(first.get("reason", "")) if isinstance(first, dict) else ""


def _silence(error: Exception, said: str) -> str:
    if isinstance(error, requests.Timeout):
        return "it took too long"
    return type(error).__name__ if isinstance(error, requests.ConnectionError) else said

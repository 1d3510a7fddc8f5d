"""What Google's errors mean here: no capacity, no quota, a wrong word, or nobody to talk to."""

import re

from google.api_core import exceptions
from google.auth import exceptions as auth_exceptions

from ....errors import ConfigError, PodUnavailable, ProviderError, TPUError
from ....runtime.google_credentials import WAY_OUT
from ...causes import Cause
from ..google.zones import ZONES_PAGE, UnknownZone

# As users saw it: github.com/skypilot-org/skypilot/issues/3840.
_NOT_OFFERED = re.compile(r"the accelerator \S+ was not found in zone")
_ZONE = re.compile(r"'locations/([^']+)'")
_NO_TOKEN = "metadata from plugin failed"  # how gRPC says that no token could be had


def is_not_offered(error: Exception) -> bool:
    """Tell whether a zone does not have the slice that was asked for."""
    return _NOT_OFFERED.search(str(error)) is not None


def is_silence(error: exceptions.GoogleAPICallError) -> bool:
    """Tell whether nobody answered, so that the call may have been carried out or not."""
    return isinstance(
        error,
        (exceptions.ServiceUnavailable, exceptions.DeadlineExceeded, exceptions.Aborted),
    ) and _NO_TOKEN not in str(error)


def explained(error: Exception, *, source: str, endpoint: str) -> TPUError:
    """Return the error of tpukit for one of Google's.

    Args:
        error: What the client raised.
        source: Where the credentials came from.
        endpoint: Whom the client talked to.
    """
    if isinstance(error, auth_exceptions.GoogleAuthError):
        return _no_token(error, source)
    said = getattr(error, "message", None) or str(error)
    match error:
        case exceptions.Unauthenticated():
            return ProviderError(
                f"Cloud TPU does not accept the credentials of {source}: they are wrong or "
                f"expired, or this machine's clock is; {WAY_OUT}."
            )
        case exceptions.PermissionDenied():
            if (zone := _ZONE.search(said)) is not None:
                return UnknownZone(zone[1], who="Cloud TPU", listed_at=ZONES_PAGE)
            return ProviderError(
                f"Cloud TPU refuses {source}: {said} Ask for the role roles/tpu.admin in the "
                "project, and check launch.project."
            )
        case exceptions.ResourceExhausted():
            return PodUnavailable(
                f"Cloud TPU has none to give: {said}", cause=cause_of_failure(said).value
            )
        case exceptions.ServiceUnavailable() if _NO_TOKEN in said:
            return _no_token(error, source)
        case _ if isinstance(error, exceptions.GoogleAPICallError) and is_silence(error):
            return ProviderError(
                f"The Cloud TPU API at {endpoint} does not answer ({_first_line(said)}); check "
                "the network, a proxy, or launch.endpoint."
            )
        case exceptions.InvalidArgument() if _NOT_OFFERED.search(said):
            return PodUnavailable(
                f"Cloud TPU has no such slice in this zone: {said}", cause=Cause.UNPLACEABLE.value
            )
        case exceptions.InvalidArgument() | exceptions.NotFound() | exceptions.FailedPrecondition():
            return ConfigError(
                f"Cloud TPU refuses the request: {said}. `tpukit pods preflight` lists what it "
                "offers."
            )
        case _:
            return ProviderError(f"Cloud TPU failed: {_first_line(said)}.")


def cause_of_failure(said: str) -> Cause:
    """Return why a pod was not to be had, by what the API said."""
    words = said.lower()
    if "quota" in words:
        return Cause.QUOTA
    if "capacity" in words or "stockout" in words or "resources" in words:
        return Cause.STOCKOUT
    if "valid until" in words or "expired" in words or "interval" in words:
        return Cause.WAITED_TOO_LONG
    return Cause.UNPLACEABLE


def _no_token(error: Exception, source: str) -> ProviderError:
    return ProviderError(
        f"No token could be had for the credentials of {source} ({type(error).__name__}): they "
        f"are revoked or expired, or Google's token server cannot be reached; {WAY_OUT}."
    )


def _first_line(said: str) -> str:
    return said.strip().splitlines()[0][:200] if said.strip() else "no reason given"

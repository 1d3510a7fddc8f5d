"""Labels, projects and zones, common to Google Cloud's APIs."""

import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import ClassVar, Self, TypeVar

import requests
from google.api_core import exceptions
from google.api_core.retry import Retry
from google.auth import exceptions as auth_exceptions

from ...errors import ConfigError, PodUnavailable, TPUError, did_you_mean
from ...job.sections import LaunchSettings
from ...runtime.google_credentials import Identity, find_identity
from ..causes import Cause

_TEXT = re.compile(r"[a-z0-9_-]{0,63}")


def check_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Return the labels if they are valid for every Google Cloud resource.

    Raises:
        ConfigError: A label has other characters, or is too long.
    """
    for key, value in labels.items():
        if not (_TEXT.fullmatch(value) and _TEXT.fullmatch(key) and key[:1].isalpha()):
            near = re.sub(r"[^a-z0-9_-]+", "-", value.lower())[:63]
            raise ConfigError(
                f"Label {key}={value!r}is not valid; Google Cloud accepts at most 63 of a-z, 0-9, "
                f"'-' and '_'. Try {near!r}."
            )
    return dict(labels)


HOST_KEYS = "hostkeys/"
"""Guest attributes in which Google's guest agent publishes a host's ssh keys."""


RETRIED_S = 2.0
"""How long calls without an answer are repeated; supervisors repeat them for longer."""
API_ERRORS = (
    exceptions.GoogleAPICallError,
    auth_exceptions.GoogleAuthError,
    requests.RequestException,
)
T = TypeVar("T")


class GoogleProject(ABC):
    """The project of a job's `launch:` section or of its credentials.

    Args:
        launch: Has the project, credentials and endpoint.
    """

    default_endpoint: ClassVar[str]

    def __init__(self, launch: LaunchSettings) -> None:
        self.launch = launch

    @cached_property
    def identity(self) -> Identity:
        """The credentials."""
        return find_identity(self.launch.credentials_file)

    @property
    def endpoint(self) -> str:
        """The API's address."""
        return self.launch.endpoint or self.default_endpoint

    @property
    def project(self) -> str:
        """The project that is used and billed.

        Raises:
            ConfigError: Neither the job nor the credentials name a project.
        """
        project = self.launch.project or self.identity.project
        if not project:
            raise ConfigError("No Google Cloud project is set; set launch.project.")
        return project

    @abstractmethod
    def is_silence(self, error: Exception) -> bool:
        """Return whether no answer came, so that the call may or may not have taken effect."""

    @abstractmethod
    def explain(self, error: Exception) -> TPUError:
        """Translate an error of Google's client to tpukit's."""

    def ask(self, call: Callable[[float], T], *, deadline: float | None = None) -> T:
        """Make an idempotent call, and retry it while no answer comes.

        Args:
            call: Takes its time limit in seconds.
            deadline: Deadline by `time.monotonic()`; by default the job's
                `launch.request_timeout_seconds` from now.

        Raises:
            ProviderError: No answer came, or the credentials were rejected.
        """
        if deadline is None:
            deadline = time.monotonic() + self.launch.request_timeout_seconds
        left_s = max(0.0, deadline - time.monotonic())
        retry = Retry(
            self.is_silence, initial=0.2, multiplier=2, maximum=1, timeout=min(RETRIED_S, left_s)
        )
        try:
            return retry(lambda: call(max(0.2, deadline - time.monotonic())))()
        except exceptions.RetryError as error:
            last = error.cause if isinstance(error.cause, Exception) else error
            raise self.explain(last) from last
        except API_ERRORS as error:
            raise self.explain(error) from error


ZONES_PAGE = "https://cloud.google.com/tpu/docs/regions-zones"
_AT_ONCE = 16


def not_offered(
    lacking: str, *, zones: Callable[[], Iterable[str]], has_it: Callable[[str], bool]
) -> PodUnavailable:
    """Return the error for a zone without a slice, which names the zones that have it.

    Args:
        lacking: What the zone lacks.
        zones: Lists the API's zones.
        has_it: Returns whether a zone has the slice; zones that do not answer are omitted.
    """

    def has(zone: str) -> bool:
        try:
            return has_it(zone)
        except TPUError:
            return False

    try:
        known = sorted(zones())
    except TPUError:
        known = []
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        others = [
            zone for zone, is_there in zip(known, pool.map(has, known), strict=True) if is_there
        ]
    way_out = f"It is in {', '.join(others)}" if others else f"{ZONES_PAGE} lists where it is"
    return PodUnavailable(f"{lacking.rstrip('.')}. {way_out}.", cause=Cause.UNPLACEABLE.value)


class UnknownZone(ConfigError, PodUnavailable):
    """The zone does not exist, or is not available to the project.

    It is a user's mistake if the user named the zone. For zones from the price catalog it means no
    capacity, and the next zone is asked.
    """

    def __init__(self, zone: str, *, who: str, listed_at: str, known: Iterable[str] = ()) -> None:
        self.zone, self.who, self.listed_at = zone, who, listed_at
        PodUnavailable.__init__(
            self,
            f"{who} has no zone {zone!r}, or does not offer it to this project; {listed_at} lists "
            f"all zones.{did_you_mean(zone, known)}",
            cause=Cause.UNPLACEABLE.value,
        )

    def among(self, known: Iterable[str]) -> Self:
        """Return the same error with the most similar existing zone."""
        return type(self)(self.zone, who=self.who, listed_at=self.listed_at, known=known)

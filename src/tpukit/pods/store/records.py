"""Records in the store: providers, wanted pods and events."""

import hashlib
import json
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from ...errors import ConfigError
from ...job.sections import LaunchSettings
from ...shown import Shown
from ..config import PodConfig
from ..pod import LONGEST_NAME, Pod, check_name

# Launch settings that identify a provider. The job's variables are excluded, because they may be
# secret.
_WHOM = (
    *("project", "zone", "zones", "endpoint", "credentials_file", "namespace", "queue", "image"),
    *("hosts", "ssh_config", "ssh_user", "service_account", "network", "software_version"),
    *("enable_ip_alias", "external_addresses", "flex_start", "flex_start_seconds"),
    *("context", "priority_class", "limits"),
)
_ROOM_FOR_ATTEMPT = len("-a9999")


@dataclass(frozen=True)
class ProviderRecord:
    """A provider's name and settings, with which it can be opened again."""

    name: str
    launch: LaunchSettings

    @classmethod
    def of(cls, name: str, launch: LaunchSettings) -> "ProviderRecord":
        """Make the record of a provider, without settings that belong only to the job."""
        settings = launch.model_dump(mode="json", include=set(_WHOM), exclude_unset=True)
        return cls(name, LaunchSettings(**settings))

    @property
    def id(self) -> str:
        """A hash that is equal for equal providers, projects and settings."""
        text = self.launch.model_dump_json(exclude_unset=True)
        return f"{self.name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def may_share_quota_with(self, other: "ProviderRecord") -> bool:
        """Return whether both may use one project's quota; an unnamed project may be any."""
        mine, theirs = self.launch, other.launch
        same_api = (self.name, mine.endpoint) == (other.name, theirs.endpoint)
        return same_api and (
            mine.project == theirs.project or None in (mine.project, theirs.project)
        )


@dataclass(frozen=True, kw_only=True)
class WantedPod:
    """A pod that should exist, and its observed state.

    Attributes:
        name: Name of the run, from which its pods' names are made.
        provider: Id of a `ProviderRecord`.
        attempt: Number of the current pod, from 1; each lost pod adds one.
        zone: Zone of the current request; None before the first.
        asked_at: When the pod was first requested there.
        released_at: When the pod was released; it is then deleted and removed from the store.
        keeper: Id of the supervisor that replaces lost pods; None for the reconciler.
        pod: The pod when last observed; None if it does not exist.
    """

    name: str
    provider: str
    config: PodConfig
    attempt: int = 1
    zone: str | None = None
    asked_at: float | None = None
    wanted_at: float
    released_at: float | None = None
    keeper: str | None = None
    kept_at: float | None = None
    pod: Pod | None = None

    @property
    def pod_name(self) -> str:
        """The provider's name for the current pod."""
        return pod_name(self.name, self.attempt)

    @property
    def is_released(self) -> bool:
        """Whether the pod is to be deleted."""
        return self.released_at is not None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "name": self.name,
            "pod_name": self.pod_name,
            "provider": self.provider,
            "asked_for": str(self.config.slice),
            "attempt": self.attempt,
            "zone": self.zone,
            "released": self.is_released,
            "pod": None if self.pod is None else self.pod.to_dict(),
        }


@dataclass(frozen=True)
class PodEvent(Shown):
    """An event of a pod or a run.

    Attributes:
        kind: One word: wanted, asked, ready, lost, refused, deleted, ….
    """

    at: float
    subject: str
    kind: str
    text: str

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "at": datetime.fromtimestamp(self.at, UTC).isoformat(timespec="seconds"),
            "subject": self.subject,
            "kind": self.kind,
            "text": self.text,
        }


def pod_name(name: str, attempt: int) -> str:
    """Return the provider's name for the pod of an attempt: `JOB-aN`."""
    return f"{name}-a{attempt}"


def split_pod_name(name: str) -> tuple[str, int]:
    """Split a pod's name into run and attempt number."""
    run, _, number = name.rpartition("-a")
    return (run, int(number)) if run and number.isdecimal() else (name, 1)


def check_run_name(name: str) -> str:
    """Return the name if the names of a run's pods can be made from it.

    Raises:
        ConfigError: The name has invalid characters, or leaves no room for an attempt number.
    """
    longest = LONGEST_NAME - _ROOM_FOR_ATTEMPT
    if len(check_name(name)) > longest:
        raise ConfigError(
            f"{name!r} is too long for a run, whose pods are named {name}-a1, {name}-a2, …; use "
            f"at most {longest} letters. Try {name[:longest].rstrip('-')!r}."
        )
    return name


def to_json(value: Any) -> str:
    """Return plain data as one line of JSON."""
    return json.dumps(value, separators=(",", ":"))

"""What the store holds, as values: providers to ask, pods that are wanted, events."""

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

# What of a launch section says whom to ask, and as whom; never the job's variables, which may be
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
    """A provider that can be opened again: its name and the settings that say whom to ask."""

    name: str
    launch: LaunchSettings

    @classmethod
    def of(cls, name: str, launch: LaunchSettings) -> "ProviderRecord":
        """Return the record of a provider, without anything that is only the job's."""
        asked = launch.model_dump(mode="json", include=set(_WHOM), exclude_unset=True)
        return cls(name, LaunchSettings(**asked))

    @property
    def id(self) -> str:
        """The same for the same provider, project and settings."""
        said = self.launch.model_dump_json(exclude_unset=True)
        return f"{self.name}-{hashlib.sha256(said.encode()).hexdigest()[:8]}"

    def may_share_quota_with(self, other: "ProviderRecord") -> bool:
        """Whether pods of both may be of one project; one that nobody names may be any."""
        one, two = self.launch, other.launch
        same_api = (self.name, one.endpoint) == (other.name, two.endpoint)
        return same_api and (one.project == two.project or None in (one.project, two.project))


@dataclass(frozen=True, kw_only=True)
class WantedPod:
    """A pod that should be there, and what is known of it.

    Attributes:
        name: Of the run it is for; its pods are called after it.
        provider: The id of a `ProviderRecord`.
        attempt: The number of the pod that is asked for now, from 1; each one lost adds one.
        zone: Where it is asked for; None before the first time.
        asked_at: When it was first asked for there.
        released_at: When it was given up; it is deleted, and then forgotten.
        keeper: Who replaces it when it is lost; None: the reconciler.
        pod: As it was last seen; None where it is not there.
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
        """What the provider calls the pod that is asked for now."""
        return pod_name(self.name, self.attempt)

    @property
    def is_released(self) -> bool:
        """Whether it is to be deleted."""
        return self.released_at is not None

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
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
    """Something that happened to a pod or a run.

    Attributes:
        kind: One word: wanted, asked, ready, lost, refused, deleted, ….
    """

    at: float
    subject: str
    kind: str
    text: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "at": datetime.fromtimestamp(self.at, UTC).isoformat(timespec="seconds"),
            "subject": self.subject,
            "kind": self.kind,
            "text": self.text,
        }


def pod_name(name: str, attempt: int) -> str:
    """Return what the provider calls the pod of an attempt: `JOB-aN`."""
    return f"{name}-a{attempt}"


def split_pod_name(name: str) -> tuple[str, int]:
    """Return the run and the attempt that a pod's name stands for."""
    run, _, number = name.rpartition("-a")
    return (run, int(number)) if run and number.isdecimal() else (name, 1)


def check_run_name(name: str) -> str:
    """Return the name of a run whose pods can be called after it.

    Raises:
        ConfigError: It has odd characters, or leaves no room for the number of an attempt.
    """
    longest = LONGEST_NAME - _ROOM_FOR_ATTEMPT
    if len(check_name(name)) > longest:
        raise ConfigError(
            f"{name!r} is too long for a run, whose pods are called {name}-a1 and so on: "
            f"{longest} letters at most. Try {name[:longest].rstrip('-')!r}."
        )
    return name


def to_json(value: Any) -> str:
    """Write plain data on one line."""
    return json.dumps(value, separators=(",", ":"))

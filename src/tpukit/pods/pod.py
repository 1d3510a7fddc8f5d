"""A pod: one or more slices that are allocated together, from any provider."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Self

from ..errors import ConfigError
from ..hardware import Slice
from ..shown import Shown
from .causes import Cause

LONGEST_NAME = 40
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


class PodState(StrEnum):
    """The life cycle of a pod. Every provider's own states map to these.

    Attributes:
        WAITING: Requested, but without capacity, quota or admission so far.
        PROVISIONING: Granted; its hosts are starting.
        READY: All hosts are ready.
        SUSPENDED: Preempted, evicted or under maintenance. It may hold quota until it is deleted,
            and does not come back by itself.
        FAILED: The provider refused it, or it broke permanently; `Pod.reason` has the reason.
        DELETING: Being deleted.
    """

    WAITING = "waiting"
    PROVISIONING = "provisioning"
    READY = "ready"
    SUSPENDED = "suspended"
    FAILED = "failed"
    DELETING = "deleting"

    @property
    def is_lost(self) -> bool:
        """Whether it can never become ready again, so that it should be deleted."""
        return self in (PodState.SUSPENDED, PodState.FAILED)


class Tier(StrEnum):
    """How a pod is paid for, which also decides whether it can be preempted."""

    ON_DEMAND = "on_demand"
    SPOT = "spot"
    RESERVED = "reserved"


@dataclass(frozen=True)
class Host(Shown):
    """A machine of a pod, which runs one process of a job.

    Attributes:
        name: The provider's name for it, also used in logs.
        address: Name or IP address to connect to, with a port if it is not ssh's.
        slice_index: Index of its slice within the pod, from 0.
        worker_id: Its number within the slice, from 0.
        internal_address: Address for the pod's other hosts; "" if it is the same.
    """

    name: str
    address: str
    slice_index: int = 0
    worker_id: int = 0
    internal_address: str = ""


@dataclass(frozen=True, kw_only=True)
class Pod(Shown):
    """A pod as its provider last described it.

    Attributes:
        name: Unique within its provider, project and zone: `JOB-aN` for attempt N of a job.
        slice: The requested slice.
        hosts: Hosts in the order of process ids; empty until the pod is ready.
        reason: The provider's reason for the state, or "".
        cause: The cause for which the pod was lost.
        labels: Labels `owner`, `job` and `attempt`. A pod with another owner must not be deleted.
        created_at: Seconds since the epoch, by the provider's clock.
    """

    name: str
    provider: str
    slice: Slice
    zone: str
    state: PodState
    tier: Tier = Tier.ON_DEMAND
    hosts: tuple[Host, ...] = ()
    reason: str = ""
    cause: Cause | None = None
    labels: Mapping[str, str] = field(default_factory=dict[str, str])
    created_at: float | None = None

    @property
    def is_ready(self) -> bool:
        """Whether all its hosts are ready."""
        return self.state is PodState.READY

    def in_state(self, state: PodState, reason: str = "") -> Self:
        """Return the same pod in another state."""
        return replace(self, state=state, reason=reason)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "name": self.name,
            "provider": self.provider,
            "slice": str(self.slice),
            "zone": self.zone,
            "state": self.state.value,
            "tier": self.tier.value,
            "hosts": [host.to_dict() for host in self.hosts],
            "reason": self.reason,
            "cause": None if self.cause is None else self.cause.value,
            "labels": dict(self.labels),
            "created_at": self.created_at,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Pod":
        """Make a pod from the output of `to_dict`."""
        return cls(
            name=values["name"],
            provider=values["provider"],
            slice=Slice.parse(values["slice"]),
            zone=values["zone"],
            state=PodState(values["state"]),
            tier=Tier(values["tier"]),
            hosts=tuple(Host(**host) for host in values["hosts"]),
            reason=values["reason"],
            cause=None if values.get("cause") is None else Cause(values["cause"]),
            labels=dict(values["labels"]),
            created_at=values["created_at"],
        )

    def __rich__(self) -> str:
        why = f" ({self.reason})" if self.reason else ""
        return f"{self.name}: {self.slice} {self.tier} in {self.zone}, {self.state}{why}"


def check_name(name: str) -> str:
    """Return the name if every provider accepts it for a resource.

    Raises:
        ConfigError: The name has other characters than a-z, 0-9 and '-', or is too long.
    """
    if not _NAME.fullmatch(name) or len(name) > LONGEST_NAME:
        raise ConfigError(
            f"{name!r} cannot name a pod; expected at most {LONGEST_NAME} letters a-z, digits and "
            f"'-', beginning with a letter. Try {as_name(name)!r}."
        )
    return name


def as_name(text: str) -> str:
    """Return a name that every provider accepts, as similar to the text as possible."""
    near = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:LONGEST_NAME].strip("-")
    return near if near[:1].isalpha() else f"job-{near}".strip("-")[:LONGEST_NAME].strip("-")

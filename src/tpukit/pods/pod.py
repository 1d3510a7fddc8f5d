"""A pod: one or more slices that were asked for together, whoever provides them."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Any, Self

from ..errors import ConfigError
from ..hardware import Slice
from ..shown import Shown
from .causes import Cause

LONGEST_NAME = 40
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")


class PodState(StrEnum):
    """Where a pod is in its life; every provider's own states map to these.

    Attributes:
        WAITING: Asked for, and not there: no capacity, no quota, or not admitted yet.
        PROVISIONING: Granted; its hosts are starting.
        READY: All hosts are there.
        SUSPENDED: Taken away (preempted, evicted, maintenance). It may still hold quota until it
            is deleted, and does not come back by itself.
        FAILED: It was refused, or broke for good; `Pod.reason` says why.
        DELETING: On its way out.
    """

    WAITING = "waiting"
    PROVISIONING = "provisioning"
    READY = "ready"
    SUSPENDED = "suspended"
    FAILED = "failed"
    DELETING = "deleting"

    @property
    def is_lost(self) -> bool:
        """Whether it will never be ready (again), so that it should be deleted."""
        return self in (PodState.SUSPENDED, PodState.FAILED)


class Tier(StrEnum):
    """How a pod is paid for, and so whether it can be taken away."""

    ON_DEMAND = "on_demand"
    SPOT = "spot"
    RESERVED = "reserved"


@dataclass(frozen=True)
class Host(Shown):
    """One machine of a pod, which runs one process of a job.

    Attributes:
        name: As the provider calls it; logs carry it.
        address: Where it is reached: a name or an IP address, with a port where it is not ssh's.
        slice_index: Which of the pod's slices it belongs to, from 0.
        worker_id: Its number within the slice, from 0.
        internal_address: Where the pod's other hosts reach it; "" where that is no other.
    """

    name: str
    address: str
    slice_index: int = 0
    worker_id: int = 0
    internal_address: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Pod(Shown):
    """A pod as its provider last described it.

    Attributes:
        name: Unique within its provider, project and zone: `JOB-aN` for attempt N of a job.
        slice: What was asked for.
        hosts: In the order of process ids; empty until it is ready.
        reason: Why it is in its state, in the provider's words, or "".
        cause: The same in one word, for a pod that is lost.
        labels: Who owns it: `owner`, `job`, `attempt`. A pod without our owner is not ours to
            delete.
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
        """Whether its hosts are all there."""
        return self.state is PodState.READY

    def in_state(self, state: PodState, reason: str = "") -> Self:
        """Return the same pod in another state."""
        return replace(self, state=state, reason=reason)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
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
        """Read what `to_dict` wrote."""
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
    """Return a name that every provider accepts for its resources.

    Raises:
        ConfigError: It has other characters than a-z, 0-9 and '-', or is too long.
    """
    if not _NAME.fullmatch(name) or len(name) > LONGEST_NAME:
        raise ConfigError(
            f"{name!r} cannot name a pod: letters a-z, digits and '-', beginning with a letter, "
            f"{LONGEST_NAME} at most. Try {as_name(name)!r}."
        )
    return name


def as_name(text: str) -> str:
    """Return the nearest name to a text that every provider accepts."""
    near = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:LONGEST_NAME].strip("-")
    return near if near[:1].isalpha() else f"job-{near}".strip("-")[:LONGEST_NAME].strip("-")

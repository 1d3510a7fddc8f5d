"""How a pod is doing."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..shown import Shown
from .pod import Pod, PodState
from .store import WantedPod
from .supervision.journal import Attempt


@dataclass(frozen=True, kw_only=True)
class PodHealth(Shown):
    """What was seen of a pod just now.

    Attributes:
        state: None where it is not there.
        reason: Why it is in its state, and what to do about it.
        replaced: How many pods before it were lost.
        attempts: How often the job that runs on it was started.
        age_s: Since it was wanted.
    """

    name: str
    state: PodState | None
    reason: str = ""
    hosts: int = 0
    replaced: int = 0
    attempts: int = 0
    age_s: float | None = None

    @property
    def is_healthy(self) -> bool:
        """Whether all its hosts are there."""
        return self.state is PodState.READY

    @classmethod
    def unknown(cls, name: str) -> "PodHealth":
        """A pod that was never asked for, or is given back."""
        return cls(name=name, state=None, reason="no such pod is wanted; tpukit pods ls lists all")

    @classmethod
    def of(
        cls, row: WantedPod, seen: Pod | None, attempts: Sequence[Attempt], *, now: float
    ) -> "PodHealth":
        """What the provider and the store say."""
        reason = "it is not there; the next pass asks for another" if seen is None else seen.reason
        return cls(
            name=row.pod_name,
            state=None if seen is None else seen.state,
            reason=reason,
            hosts=0 if seen is None else len(seen.hosts),
            replaced=row.attempt - 1,
            attempts=len(attempts),
            age_s=now - row.wanted_at,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "name": self.name,
            "state": None if self.state is None else self.state.value,
            "is_healthy": self.is_healthy,
            "reason": self.reason,
            "hosts": self.hosts,
            "replaced": self.replaced,
            "attempts": self.attempts,
            "age_s": self.age_s,
        }

    def __rich__(self) -> str:
        why = f" ({self.reason})" if self.reason else ""
        return f"{self.name}: {self.state or 'not there'}{why}, {self.hosts} hosts"

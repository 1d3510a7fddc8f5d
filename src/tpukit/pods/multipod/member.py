"""One of several pods, and whoever knows which of them are lost."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..config import PodConfig
from ..pod import Pod

Watch = Callable[[], Mapping[str, str]]
"""Returns the pods that are lost by name, each with why."""


@dataclass(frozen=True)
class MeshMember:
    """A pod that takes part.

    Attributes:
        name: The pod's, or its number and zone where nobody was asked for one.
        pod: As it was given; None where the job's own runtime is divided.
    """

    name: str
    config: PodConfig
    pod: Pod | None = None

    @property
    def zone(self) -> str:
        """Where it is, as far as is known."""
        if self.pod is not None:
            return self.pod.zone
        return self.config.zones[0] if self.config.zones else ""


class PodKeeper(Protocol):
    """Whoever gets pods and knows how they are: `TpuManager`."""

    def allocate_pod(self, config: PodConfig) -> Pod:
        """Return a pod that is ready."""
        ...

    def release(self, pod: Pod) -> None:
        """Give one back."""
        ...

    def list(self) -> Sequence[Pod]:
        """Return all pods as they are now."""
        ...


def watch_pods(keeper: PodKeeper, members: Sequence[MeshMember]) -> Watch:
    """Return a look at which of some pods are lost."""
    wanted = {member.name for member in members if member.pod is not None}

    def look() -> Mapping[str, str]:
        now = {pod.name: pod for pod in keeper.list() if pod.name in wanted}
        lost = {
            name: pod.reason or pod.state.value for name, pod in now.items() if pod.state.is_lost
        }
        gone = dict.fromkeys(wanted - now.keys(), "it is no longer there")
        return {**lost, **gone}

    return look

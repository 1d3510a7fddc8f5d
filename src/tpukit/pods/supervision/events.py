"""What a supervisor tells whoever listens: what it asked for, got, lost and gave back."""

from dataclasses import dataclass

from ..causes import Cause
from ..pod import Pod
from ..providers.protocol import GangEvent
from .journal import Attempt


@dataclass(frozen=True)
class PodAsked:
    """A pod is about to be asked for."""

    name: str
    zone: str


@dataclass(frozen=True)
class PodRefused:
    """A zone did not give a pod, or not in time."""

    name: str
    zone: str
    cause: Cause
    reason: str


@dataclass(frozen=True)
class PodReady:
    """A pod is there; from now on it costs."""

    pod: Pod


@dataclass(frozen=True)
class PodReleased:
    """A pod was deleted: it was lost, is to be replaced, or is no longer needed."""

    pod: Pod


@dataclass(frozen=True)
class AttemptBegan:
    """Processes were started."""

    attempt: Attempt


@dataclass(frozen=True)
class AttemptEnded:
    """They have all ended, with `attempt.ending`."""

    attempt: Attempt


SupervisionEvent = (
    PodAsked | PodRefused | PodReady | PodReleased | AttemptBegan | AttemptEnded | GangEvent
)

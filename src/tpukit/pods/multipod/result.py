"""What a synchronized step gives back."""

from dataclasses import dataclass, field
from typing import Any

from ...annotations import PyTree
from ...hardware import Figure
from ...hardware.figure import seconds_text
from ...shown import Shown


@dataclass(frozen=True, kw_only=True)
class SynchronizedStep(Shown):
    """One step of all pods.

    Attributes:
        step: How many have been taken, this one included.
        pods: Names of those that took part.
        dropped: Pods that were lost since the step before, each with why.
        seconds: From the call to the last pod's end (measured).
        parameters: That all pods have in common now.
        gradients: Their mean over pods; with local steps, each pod's own.
        sent: What one pod sent to others for it.
    """

    step: int
    pods: tuple[str, ...]
    dropped: dict[str, str]
    seconds: float
    gradient_norm: float
    sent: Figure
    parameters: PyTree = field(repr=False)
    gradients: PyTree = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, without the arrays."""
        return {
            "step": self.step,
            "pods": list(self.pods),
            "dropped": dict(self.dropped),
            "seconds": {"value": self.seconds, "origin": "measured"},
            "gradient_norm": self.gradient_norm,
            "sent_bytes": self.sent.to_dict(),
        }

    def __rich__(self) -> str:
        lost = "".join(f", lost {name} ({why})" for name, why in self.dropped.items())
        return (
            f"step {self.step} on {len(self.pods)} pods in {seconds_text(self.seconds)}, gradient "
            f"norm {self.gradient_norm:.4g}, {self.sent.text} sent by each pod (model){lost}"
        )

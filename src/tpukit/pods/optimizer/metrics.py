"""What a step of `TpuOptimizer` measured."""

from dataclasses import dataclass, field
from typing import Any

from ...annotations import PyTree
from ...hardware.missing import Measured, plain
from ...shown import Shown


@dataclass(frozen=True, kw_only=True)
class StepMetrics(Shown):
    """One step.

    Attributes:
        loss: Of the batch, before the step; missing where gradients were given.
        seconds: From the call to the end of the step on all devices (measured).
        examples: In the batch; None where gradients were given.
        program: Fingerprint of the graph that ran, where one was loaded.
        params: The new parameters, also for trees whose arrays cannot be changed in place.
    """

    step: int
    loss: Measured
    gradient_norm: float
    seconds: float
    examples: int | None = None
    program: str | None = None
    params: PyTree = field(default=None, repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Plain data, without the parameters."""
        return {
            "step": self.step,
            "loss": plain(self.loss),
            "gradient_norm": self.gradient_norm,
            "seconds": {"value": self.seconds, "origin": "measured"},
            "examples": self.examples,
            "program": self.program,
        }

"""What preemption wastes on spot capacity, and how often to save so that it wastes least."""

from dataclasses import dataclass
from typing import Any

import numpy as np

SECONDS_PER_DAY = 86_400.0
_SOURCE = (
    "skypilot-org/skypilot PR 1500 (2022): 7 spot TPU jobs, 42 recoveries in 3 to 4 days, "
    "8.0 h lost together"
)


@dataclass(frozen=True, kw_only=True)
class Preemption:
    """How often a spot slice is taken away, and what getting going again costs.

    The defaults are the one public record we know, of small slices in 2022; capacity differs by
    zone and week, so give your own where you have them.

    Attributes:
        per_slice_day: Preemptions of one slice in a day.
        recovery_s: From losing the slice to the first step after it.
        source: Where both come from.
    """

    per_slice_day: float = 42 / 7 / 3.5
    recovery_s: float = 8.0 * 3600 / 42
    source: str = _SOURCE

    def interval_s(self, save_s: Any, num_slices: Any) -> Any:
        """Young and Daly's interval between two checkpoints, each holding the step up `save_s`."""
        return np.sqrt(2 * save_s * self._between_s(num_slices))

    def waste(self, save_s: Any, num_slices: Any) -> Any:
        """Share of time that makes no progress: saving, redoing half an interval, recovering."""
        interval = self.interval_s(save_s, num_slices)
        lost = interval / 2 + self.recovery_s
        wasted = save_s / np.maximum(interval, 1e-9) + lost / self._between_s(num_slices)
        return np.minimum(wasted, 0.99)

    def _between_s(self, num_slices: Any) -> Any:
        """One slice lost stops them all."""
        return SECONDS_PER_DAY / (self.per_slice_day * num_slices)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "per_slice_day": self.per_slice_day,
            "recovery_s": self.recovery_s,
            "source": self.source,
            "interval": "Young/Daly: sqrt(2 x save x time between preemptions)",
        }

"""What preemption wastes on spot capacity, and how often to save so that it wastes least.

A slice is up for a random time, is lost, and comes back after a recovery; what was done since the
last save is done again. How often that happens is counted by the day on the clock, recoveries
included, as a record of real jobs counts it: more preemptions than recoveries fit into a day leave
nothing.

A save holds the step up while state goes to the host, and is worth nothing until it is written to
the store, beside the steps. Saves are as far apart as is best if the write held the run up too:
that bounds what the store and the hosts do beside training, and costs little, because waste hardly
changes near its least.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ...runtime.ranges import Range

SECONDS_PER_DAY = 86_400.0
# A run that makes less progress than this is said never to finish: it is no plan at any price.
LEAST_PROGRESS = 0.01
MOST_PER_DAY = 1440.0
_NEWTON_STEPS = 6
_MOMENT_S, _NEVER = 1e-6, 1e-12  # instead of nothing, in seconds and times a day
# google/orbax issue 392 (2023): checkpoints of about 200 GB took 38 s to a bucket of Cloud Storage.
STORE_BYTES_PER_S = 200e9 / 38
STORE_SOURCE = "google/orbax issue 392 (2023): 200 GB in 38 s to a Cloud Storage bucket"
_SLOWEST_STORE, _FASTEST_STORE = 1e6, 1e13
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
        per_slice_day: Preemptions of one slice in a day on the clock.
        recovery_s: From losing the slice to the first step after it.
        source: Where both come from.
        store_bytes_per_s: At which all hosts together write a checkpoint.
        store_source: Where that comes from.
    """

    per_slice_day: float = 42 / 7 / 3.5
    recovery_s: float = 8.0 * 3600 / 42
    source: str = _SOURCE
    store_bytes_per_s: float = STORE_BYTES_PER_S
    store_source: str = STORE_SOURCE

    def __post_init__(self) -> None:
        Range(0, MOST_PER_DAY).check("preemptions per day", self.per_slice_day, unit="of a slice")
        Range(0, SECONDS_PER_DAY).check("recovery", self.recovery_s, unit="seconds")
        store = Range(_SLOWEST_STORE, _FASTEST_STORE)
        store.check("store_bytes_per_s", self.store_bytes_per_s, unit="bytes a second")

    def write_s(self, saved_bytes: Any) -> Any:
        """Return the seconds until a checkpoint of so many bytes is in the store."""
        return saved_bytes / self.store_bytes_per_s

    def up_s(self, num_slices: Any) -> Any:
        """How long slices that work together are up in the mean: one lost stops them all.

        Not above zero where recoveries fill the day.
        """
        lost = np.maximum(self.per_slice_day * np.asarray(num_slices, float), _NEVER)
        return SECONDS_PER_DAY / lost - self.recovery_s

    def interval_s(
        self, save_s: Any, num_slices: Any, *, write_s: Any = 0.0, step_s: Any = 0.0
    ) -> Any:
        """Return the interval between two checkpoints, at least a step and at least a write.

        Young's square root, and from there Newton's way to Daly's exact optimum.

        Args:
            save_s: For which each checkpoint holds the step up.
            num_slices: That work together.
            write_s: Until it is in the store.
            step_s: Of one step; saves come after whole steps.
        """
        up = np.maximum(self.up_s(num_slices), _MOMENT_S)
        delay = np.maximum(np.add(save_s, write_s), _MOMENT_S) / up
        share = np.minimum(1.0, np.sqrt(2 * delay))
        for _ in range(_NEWTON_STEPS):
            slope = -np.expm1(-(share + delay))
            share = share - (share - slope) / slope
        return np.maximum(np.maximum(share * up, write_s), step_s)

    def progress(
        self, save_s: Any, num_slices: Any, *, write_s: Any = 0.0, step_s: Any = 0.0
    ) -> Any:
        """Share of the time that is kept: neither saving, nor recovering, nor done again.

        While a slice is up for exponentially distributed times, `exp(-write / up) /
        (exp((interval + save) / up) - 1)` intervals are finished and written in the mean.
        """
        up = self.up_s(num_slices)
        interval = self.interval_s(save_s, num_slices, write_s=write_s, step_s=step_s)
        alive = np.maximum(up, _MOMENT_S)
        with np.errstate(over="ignore"):
            kept = interval / np.expm1((interval + np.maximum(save_s, _MOMENT_S)) / alive)
            kept = kept * np.exp(-np.asarray(write_s) / alive)
        return np.where(up > 0, kept / (alive + self.recovery_s), 0.0)

    def waste(self, save_s: Any, num_slices: Any, *, write_s: Any = 0.0, step_s: Any = 0.0) -> Any:
        """Share of the time that makes no progress; all of it where the run would never finish."""
        kept = self.progress(save_s, num_slices, write_s=write_s, step_s=step_s)
        return np.where(kept < LEAST_PROGRESS, 1.0, 1.0 - kept)

    def why_never(
        self, save_s: float, num_slices: int, *, write_s: float = 0.0, step_s: float
    ) -> str:
        """Why a run makes no progress, and with what half of its time would count."""

        def enough(per_day: float, recovery_s: float) -> bool:
            other = replace(self, per_slice_day=per_day, recovery_s=recovery_s)
            kept = other.progress(save_s, num_slices, write_s=write_s, step_s=step_s)
            return float(kept) >= 0.5

        rate = _most(lambda per_day: enough(per_day, self.recovery_s), self.per_slice_day)
        together = f" each of {num_slices} slices" if num_slices > 1 else " a slice"
        words = (
            f"never finishes: with {self.per_slice_day:,.4g} preemptions a day of{together} and "
            f"{self.recovery_s / 60:.3g} min to be back, no checkpoint interval makes progress. "
            f"Half of the time would count with {rate:.3g} preemptions a day"
        )
        if enough(self.per_slice_day, 0.0):
            recovery = _most(lambda seconds: enough(self.per_slice_day, seconds), self.recovery_s)
            return f"{words}, or back within {recovery / 60:.2g} min"
        whole_s = save_s + write_s
        return f"{words}; no recovery is short enough, each save takes {whole_s:.3g} s"

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "per_slice_day": self.per_slice_day,
            "recovery_s": self.recovery_s,
            "source": self.source,
            "store_bytes_per_s": self.store_bytes_per_s,
            "store_source": self.store_source,
            "interval": "Young/Daly, a save and its write counted",
        }


def _most(does: Callable[[float], bool], high: float) -> float:
    """The largest number up to `high` that still does, by halves."""
    low = 0.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if does(middle) else (low, middle)
    return low

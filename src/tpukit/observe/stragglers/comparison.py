"""Which of several hosts is slower than the others, told apart from noise.

Two questions, one home:

- `stands_out`: many samples of each host. A host is *late* in a sample when it is a margin above
  the median of the others. Where hosts differ by noise alone, each is late as often as any other.
  How unlikely it is that one is late so much more often is bounded by Chernoff, whatever the noise
  is distributed like, so that false alarms are as rare as `FALSE_ALARMS` says.
- `find_stragglers`: a few timed rounds of the same work on each host, nothing else running. There
  the mean of all is the measure.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import TPUValidationError
from ...shown import Shown

Matrix = np.ndarray[Any, np.dtype[np.float64]]
FALSE_ALARMS = 1e-4  # of reports in which nothing but noise differs, for each thing compared
OVER_MEAN = 1.25  # of timed rounds: a host is slow from this multiple of the mean on


@dataclass(frozen=True)
class Late:
    """A host that is late more often than chance has it.

    Attributes:
        at: Its row.
        share: Of the samples in which it is late.
        excess: Above the median of the others, the mean over all samples (0 where it is not late).
        value: The median of its own samples, or their mean where most are 0.
        others: The same of the others together.
    """

    at: int
    share: float
    excess: float
    value: float
    others: float


def stands_out(values: Matrix, margin: float | Matrix) -> list[Late]:
    """Return the hosts that are late too often to be noise, the latest first.

    Args:
        values: One row a host, one column a sample; greater is worse.
        margin: How far above the median of the others a sample is late; one, or one a column.
    """
    hosts, samples = values.shape
    if hosts < 2 or not samples:
        return []
    excess = np.stack([values[at] - _others(values, at) for at in range(hosts)])
    late = excess > margin
    by_sample = late.sum(axis=0)
    seen = by_sample > 0
    tried = int(seen.sum())
    if not tried:
        return []
    expected = float(by_sample[seen].mean()) / hosts
    found: list[Late] = []
    for at in range(hosts):
        times = int(late[at].sum())
        if log_chance(times, tried, expected) < math.log(FALSE_ALARMS / hosts):
            middle = np.median if np.median(values[at]) > 0 else np.mean
            rest = np.delete(values, at, axis=0)
            found.append(
                Late(
                    at,
                    times / samples,
                    float(np.where(late[at], excess[at], 0.0).mean()),
                    float(middle(values[at])),
                    float(middle(rest)),
                )
            )
    return sorted(found, key=lambda one: -one.excess)


def log_chance(times: int, tried: int, expected: float) -> float:
    """Bound the logarithm of the chance to be late at least so often (Chernoff, Hoeffding).

    Args:
        times: That a host was late.
        tried: Samples in which some host was.
        expected: The mean chance of each.
    """
    seen = times / tried
    if seen <= expected:
        return 0.0
    if expected <= 0.0:
        return -math.inf
    rest = (1 - seen) * math.log((1 - seen) / (1 - expected)) if seen < 1 else 0.0
    return -tried * (seen * math.log(seen / expected) + rest)


def _others(values: Matrix, at: int) -> Matrix:
    return np.median(np.delete(values, at, axis=0), axis=0)


@dataclass(frozen=True)
class Stragglers(Shown):
    """Which hosts hold the others up, by timed rounds of the same work.

    Attributes:
        step_s: The median round of each host (measured).
        slow: Hosts whose median is far above the mean of all, the slowest first.
        skew: The slowest over the mean: how much longer all wait than they would have to.
    """

    step_s: Mapping[str, float]
    slow: tuple[str, ...]
    skew: float

    def __bool__(self) -> bool:
        return bool(self.slow)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"step_s": dict(self.step_s), "slow": list(self.slow), "skew": self.skew}

    def __rich__(self) -> str:
        if not self.slow:
            return f"no straggler: the slowest takes {self.skew:.2f} of the mean step (measured)"
        named = ", ".join(f"{host} ({self.step_s[host]:.3g} s)" for host in self.slow)
        return f"slow: {named}; all wait {self.skew:.2f} of the mean step (measured)"


def find_stragglers(
    step_times_s: Mapping[str, Sequence[float]], *, over_mean: float = OVER_MEAN
) -> Stragglers:
    """Return the hosts whose steps take longer than those of the others.

    Args:
        step_times_s: The last steps of each host, each without waiting for others.
        over_mean: A host is slow from this multiple of the mean on.

    Raises:
        TPUValidationError: A host has no step that was timed.
    """
    if not step_times_s or not all(step_times_s.values()):
        raise TPUValidationError(
            "Every host needs at least one timed step to be compared with the others."
        )
    medians = {host: statistics.median(times) for host, times in step_times_s.items()}
    mean = statistics.fmean(medians.values())
    hot = [host for host, median in medians.items() if median > over_mean * mean]
    slow = sorted(hot, key=lambda host: -medians[host])
    return Stragglers(medians, tuple(slow), max(medians.values()) / mean if mean else 1.0)

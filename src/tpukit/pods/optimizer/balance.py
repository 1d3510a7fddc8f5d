"""Slow hosts found by how their step times differ, and work divided by how fast each is."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...errors import TPUValidationError
from ...parallel.rebalancing.hotspots import HOT_OVER_MEAN, detect_hotspots


@dataclass(frozen=True)
class Stragglers:
    """Which hosts hold the others up.

    Attributes:
        step_s: The median step of each host (measured).
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
    step_times_s: Mapping[str, Sequence[float]], *, over_mean: float = HOT_OVER_MEAN
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
    hosts = list(medians)
    hot = {hosts[at] for (at,) in detect_hotspots(np.array([*medians.values()]), over_mean * mean)}
    slow = sorted(hot, key=lambda host: -medians[host])
    return Stragglers(medians, tuple(slow), max(medians.values()) / mean if mean else 1.0)


def balance_examples(
    step_times_s: Mapping[str, float], examples: int, *, now: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Return how many examples each host should take so that all finish together.

    Each next example goes to the host that would finish it first, so that no other division into
    whole examples ends earlier. Weigh gradients by these numbers:
    `step_synchronized(gradients, weights=…)`.

    Args:
        step_times_s: A step of each host, with the examples it has now.
        examples: To divide.
        now: How many each host has now; by default the same for all.

    Raises:
        TPUValidationError: A time or a number is not above 0, or there are too few examples.
    """
    held = {host: 1 if now is None else now[host] for host in step_times_s}
    if any(seconds <= 0 for seconds in step_times_s.values()) or min(held.values()) <= 0:
        raise TPUValidationError("Every host needs a step time and a number of examples above 0.")
    if examples < len(held):
        raise TPUValidationError(
            f"{examples} examples are too few for {len(held)} hosts; each needs at least one."
        )
    each_s = {host: step_times_s[host] / held[host] for host in held}
    shares = dict.fromkeys(held, 1)
    left = examples - len(held)
    # Most by proportion, at once; the rest one by one.
    speed = sum(1 / seconds for seconds in each_s.values())
    for host, seconds in each_s.items():
        more = max(0, int(examples / (seconds * speed)) - 1)
        shares[host] += min(more, left)
        left -= min(more, left)
    for _ in range(left):
        first = min(shares, key=lambda host: (shares[host] + 1) * each_s[host])
        shares[first] += 1
    return shares

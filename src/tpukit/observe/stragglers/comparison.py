"""Which of several hosts is slower than the others, told apart from noise; and the report of it.

- `stands_out`: many samples of each host. A host is *late* in a sample that is a margin above the
  median of the others. Where hosts differ by noise alone, each is late as often as any other. The
  probability that one is late much more often is bounded by Chernoff, whatever the distribution of
  the noise, so that false alarms are as rare as `FALSE_ALARMS`.
- `find_stragglers`: a few timed rounds of the same work on each host, with nothing else running.
  The reference is the mean of all hosts.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ...errors import TPUValidationError
from ...shown import Shown

Cause = Literal["input", "checkpoint", "link", "chip", "host"]
ADVICE: dict[Cause, str] = {
    "input": "check its disk, its network to the data and its CPUs; `tpukit data inspect`",
    "checkpoint": "check its path to the checkpoint storage",
    "link": "check the host's links, and remove it from the slice",
    "chip": "replace the host: the chip is throttled or does less than the others",
    "host": "check for other work on that machine",
}


@dataclass(frozen=True, kw_only=True)
class Straggler(Shown):
    """A host that is slower than the others.

    Attributes:
        host: Its name.
        process: Its process index.
        cause: The part that is slow.
        evidence: Its figures beside those of the other hosts (measured).
        share: Share of the run's time in which others wait for it; None from chip readings alone.
    """

    host: str
    process: int
    cause: Cause
    evidence: str
    share: float | None = None
    _facts = ("host", "process", "cause", "evidence", "share", "advice")

    @property
    def advice(self) -> str:
        """What to check on the host."""
        return ADVICE[self.cause]

    def __str__(self) -> str:
        lost = "" if self.share is None else f", others wait {self.share:.0%} of the time"
        return (
            f"{self.host} (process {self.process}) is slow at {self.cause}{lost}: {self.evidence}"
        )


@dataclass(frozen=True, kw_only=True)
class StragglerReport(Shown):
    """The result of comparing the hosts of a run.

    Attributes:
        found: Slow hosts, the costliest first; empty where hosts differ by noise only.
        hosts: Number of hosts compared.
        steps: Number of steps compared per host.
        notes: What could not be compared, and why.
    """

    found: tuple[Straggler, ...]
    hosts: int
    steps: int
    notes: tuple[str, ...] = ()
    origin = "measured"
    _facts = ("found", "hosts", "steps", "notes", "origin")

    def __bool__(self) -> bool:
        return bool(self.found)

    def __str__(self) -> str:
        if self.found:
            return "; ".join(map(str, self.found))
        compared = f"{self.hosts} hosts over {self.steps} steps"
        return "; ".join([f"no straggler among {compared}", *self.notes])

    def __rich__(self) -> RenderableType:
        if not self.found:
            return Text(str(self))
        table = Table(title=f"stragglers of {self.hosts} hosts, over {self.steps} steps (measured)")
        table.title_justify = "left"
        for name in ("host", "slow at", "others wait", "what shows it", "look at"):
            table.add_column(name)
        for straggler in self.found:
            share = "–" if straggler.share is None else f"{straggler.share:.1%}"
            cells = (straggler.host, straggler.cause, share, straggler.evidence, straggler.advice)
            table.add_row(*(Text(cell) for cell in cells))
        if self.notes:
            table.caption = Text("; ".join(self.notes))
        return table


Matrix = np.ndarray[Any, np.dtype[np.float64]]
FALSE_ALARMS = 1e-4  # probability per comparison where hosts differ by noise only
OVER_MEAN = 1.25  # multiple of the mean above which a host is slow, in timed rounds


@dataclass(frozen=True)
class Late:
    """A host that is late more often than by chance.

    Attributes:
        row: Its row in the matrix.
        share: Share of the samples in which it is late.
        excess: Mean over all samples of its value above the others' median (0 where not late).
        value: The median of its own samples, or their mean where most are 0.
        others: The same of all other hosts.
    """

    row: int
    share: float
    excess: float
    value: float
    others: float


def stands_out(values: Matrix, margin: float | Matrix) -> list[Late]:
    """Return the hosts that are late too often to be noise, the latest first.

    Args:
        values: One row per host, one column per sample; greater is worse.
        margin: How far above the others' median a sample is late; one number, or one per column.
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
    late_hosts: list[Late] = []
    for at in range(hosts):
        times = int(late[at].sum())
        if log_chance(times, tried, expected) < math.log(FALSE_ALARMS / hosts):
            middle = np.median if np.median(values[at]) > 0 else np.mean
            rest = np.delete(values, at, axis=0)
            late_hosts.append(
                Late(
                    at,
                    times / samples,
                    float(np.where(late[at], excess[at], 0.0).mean()),
                    float(middle(values[at])),
                    float(middle(rest)),
                )
            )
    return sorted(late_hosts, key=lambda late: -late.excess)


def log_chance(times: int, tried: int, expected: float) -> float:
    """Return a bound on the log probability of being late this often (Chernoff, Hoeffding).

    Args:
        times: Samples in which a host was late.
        tried: Samples in which any host was late.
        expected: The mean probability per host.
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
    """The slow hosts, by timed rounds of the same work.

    Attributes:
        step_s: The median round of each host (measured).
        slow: Hosts whose median is far above the mean of all, the slowest first.
        skew: The slowest host over the mean: the factor by which all hosts wait.
    """

    step_s: Mapping[str, float]
    slow: tuple[str, ...]
    skew: float

    def __bool__(self) -> bool:
        return bool(self.slow)

    def __rich__(self) -> str:
        if not self.slow:
            return f"no straggler: the slowest takes {self.skew:.2f} of the mean step (measured)"
        named = ", ".join(f"{host} ({self.step_s[host]:.3g} s)" for host in self.slow)
        return f"slow: {named}; all wait {self.skew:.2f} of the mean step (measured)"


def find_stragglers(
    step_times_s: Mapping[str, Sequence[float]], *, over_mean: float = OVER_MEAN
) -> Stragglers:
    """Return the hosts with longer steps than the others.

    Args:
        step_times_s: Times of each host's last steps, without waiting for others.
        over_mean: A host is slow above this multiple of the mean.

    Raises:
        TPUValidationError: A host has no timed step.
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

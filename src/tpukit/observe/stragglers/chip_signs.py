"""What the readings of chips and links say about a slow host."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from ..readings import Reading
from .comparison import Late, stands_out
from .report import Cause, Straggler

NEWEST = 60  # readings of each host
ENOUGH = 3  # readings, before a score that is 0 on a healthy machine is believed
PERSISTENT = 6  # of libtpu's score of a link: from here on errors are no longer transient
# Wide margins: libtpu's figures are means of some seconds, and its latencies sum up all that ever
# happened, so that one reading is much like the next and many of them prove little more than one.
SHARE_APART = 0.1  # of a duty cycle or utilization
LATENCY_APART = 0.5  # of the usual latency


class Watched(Protocol):
    """A host whose chips were read."""

    @property
    def process(self) -> int:
        """Its process of the run."""
        ...

    @property
    def name(self) -> str:
        """The machine's name."""
        ...

    @property
    def readings(self) -> Sequence[Reading]:
        """What its monitor said, oldest first."""
        ...


def judge_readings(hosts: Sequence[Watched], *, explained: bool) -> list[Straggler]:
    """Return the hosts that their chips or links show to be slow.

    Args:
        hosts: Those of the run.
        explained: Whether step records named a slow host already: chips that stand idle, and
            collectives that do not wait, are then what follows from it.
    """
    found = [*_scored(hosts, "link", "ici_link_health", _bad_link, "of an ICI link, 0 is healthy")]
    found += _scored(hosts, "chip", "throttle_score", _throttled, "throttled, 0 is not at all")
    found += _compared(hosts, "link", "dcn_latency_seconds", "s for a transfer between slices")
    if not explained and not found:
        found += _compared(
            hosts, "chip", "collective_latency_seconds", "s in a collective: it never waits", -1.0
        )
        idle = _compared(hosts, "host", "duty_cycle", "of the time its chips are busy", -1.0)
        unused = _compared(
            hosts, "chip", "tensorcore_utilization", "of what its chips could do", -1.0
        )
        left = {one.process for one in idle}
        found += idle + [one for one in unused if one.process not in left]
    first: dict[int, Straggler] = {}
    for one in found:
        first.setdefault(one.process, one)
    return list(first.values())


def _scored(
    hosts: Sequence[Watched],
    cause: Cause,
    metric: str,
    is_bad: Callable[[Sequence[float]], bool],
    what: str,
) -> list[Straggler]:
    """Hosts with a bad score, unless all have it: the score means the same on every machine."""
    scores = {host.process: newest_values(host, metric, worst=max) for host in hosts}
    typical = {process: statistics.median(found) for process, found in scores.items() if found}
    named: list[Straggler] = []
    for host in hosts:
        own = scores[host.process]
        others = [value for process, value in typical.items() if process != host.process]
        usual = statistics.median(others) if others else 0.0
        if len(own) >= ENOUGH and is_bad(own) and max(own[-ENOUGH:]) > usual:
            evidence = f"score {max(own[-ENOUGH:]):g} {what}; the others {usual:g}"
            named.append(_named(host, cause, evidence))
    return named


def _bad_link(scores: Sequence[float]) -> bool:
    """Errors that libtpu calls persistent, or transient ones that do not pass."""
    return min(scores[-ENOUGH:]) >= PERSISTENT or sorted(scores)[len(scores) // 5] > 0


def _throttled(scores: Sequence[float]) -> bool:
    return statistics.median(scores) >= 1


def _compared(
    hosts: Sequence[Watched], cause: Cause, metric: str, what: str, sign: float = 1.0
) -> list[Straggler]:
    """Hosts whose values are far above those of the others; below them where `sign` is -1."""
    values = {host.process: newest_values(host, metric) for host in hosts}
    having = [host for host in hosts if values[host.process]]
    count = min((len(values[host.process]) for host in having), default=0)
    if len(having) < 2 or not count:
        return []
    matrix = sign * np.array([values[host.process][-count:] for host in having])
    is_latency = metric.endswith("_seconds")
    margin = np.median(np.abs(matrix), axis=0) * LATENCY_APART if is_latency else SHARE_APART
    return [
        _named(having[late.at], cause, _evidence(late, sign, what, is_share=not is_latency))
        for late in stands_out(matrix, margin)
    ]


def _evidence(late: Late, sign: float, what: str, *, is_share: bool) -> str:
    own, others = sign * late.value, sign * late.others
    if is_share:
        return f"{own:.0%} {what}, the others {others:.0%}"
    return f"{own:.3g} {what}, the others {others:.3g}"


def newest_values(
    host: Watched, metric: str, *, worst: Callable[[Sequence[float]], float] = statistics.fmean
) -> list[float]:
    """Return a metric of a host's last readings, one value each, oldest first.

    Args:
        host: Whose readings.
        metric: A name of the glossary; of quantiles the median is taken.
        worst: How the values of its chips and links become one.
    """
    found: list[float] = []
    for reading in host.readings:
        values = [
            sample.value
            for sample in reading.samples
            if sample.metric == metric and is_typical(sample.labels)
        ]
        if values:
            found.append(worst(values))
    return found[-NEWEST:]


def is_typical(labels: Mapping[str, str]) -> bool:
    """Whether a sample is no quantile, or the median."""
    return labels.get("quantile", "0.5") == "0.5"


def _named(host: Watched, cause: Cause, evidence: str) -> Straggler:
    return Straggler(host=host.name, process=host.process, cause=cause, evidence=evidence)

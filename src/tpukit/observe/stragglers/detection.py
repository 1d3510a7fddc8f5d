"""Find the slow hosts of a run and the cause of each, from the hosts' own records.

In synchronous training every step ends on all hosts at once, because its collectives make all chips
wait for the last one. So step times do not show which host is slow. Hosts differ in the time before
they dispatch a step, and in the readings of their chips:

| cause | evidence |
|---|---|
| input | its chips were idle while it waited for its rows (`input_stall_s`) |
| checkpoint | its calls to save took longer (`checkpoint_s`) |
| host | it took longer to dispatch (`dispatch_s`), or its chips are idle more than others |
| link | its ICI links report errors, or its transfers between slices take longer |
| chip | its chips report throttling; or it is the one whose collectives never wait: the others' \
do, for it; or, where steps are not synchronous, its own compute takes longer |

Late input that is hidden behind the step before it costs nothing, so only time with idle chips
counts. Where dispatch itself waits for other hosts (as on CPUs, where programs run while they are
dispatched), fast hosts seem slow at dispatch. So dispatch is compared only when no host is slow at
input or saving. A save with a barrier at its end does not show which host was slow.
"""

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from ...records.host_steps import HostStep, parse_steps, steps_file
from ...records.lines import try_read_end
from ..readings import Reading
from .comparison import Cause, Late, Matrix, Straggler, StragglerReport, stands_out

NEWEST = 60  # readings of each host
ENOUGH = 3  # readings that must have a bad score
PERSISTENT = 6  # link score from which libtpu's errors are no longer transient
# Wide margins, because consecutive readings are correlated: libtpu's figures are means of some
# seconds, and its latencies are cumulative.
SHARE_APART = 0.1  # of a duty cycle or utilization
LATENCY_APART = 0.5  # of the usual latency


class Watched(Protocol):
    """A host with readings of its chips."""

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
        """Its monitor's readings, oldest first."""
        ...


def judge_readings(hosts: Sequence[Watched], *, explained: bool) -> list[Straggler]:
    """Return the hosts that are slow by the readings of their chips and links.

    Args:
        hosts: The hosts of the run.
        explained: Whether step records already show a slow host. Idle chips, and collectives that
            do not wait, are then its consequences and not causes.
    """
    stragglers = [
        *_scored(hosts, "link", "ici_link_health", _bad_link, "of an ICI link, 0 is healthy")
    ]
    stragglers += _scored(hosts, "chip", "throttle_score", _throttled, "throttled, 0 is not at all")
    stragglers += _compared(hosts, "link", "dcn_latency_seconds", "s for a transfer between slices")
    if not explained and not stragglers:
        stragglers += _compared(
            hosts, "chip", "collective_latency_seconds", "s in a collective: it never waits", -1.0
        )
        idle = _compared(hosts, "host", "duty_cycle", "of the time its chips are busy", -1.0)
        unused = _compared(
            hosts, "chip", "tensorcore_utilization", "of what its chips could do", -1.0
        )
        left = {straggler.process for straggler in idle}
        stragglers += idle + [straggler for straggler in unused if straggler.process not in left]
    first: dict[int, Straggler] = {}
    for straggler in stragglers:
        first.setdefault(straggler.process, straggler)
    return list(first.values())


def _scored(
    hosts: Sequence[Watched],
    cause: Cause,
    metric: str,
    is_bad: Callable[[Sequence[float]], bool],
    what: str,
) -> list[Straggler]:
    """Return the hosts with a bad score that the others do not have."""
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
    """Return whether scores show persistent errors, or transient ones that do not end."""
    return min(scores[-ENOUGH:]) >= PERSISTENT or sorted(scores)[len(scores) // 5] > 0


def _throttled(scores: Sequence[float]) -> bool:
    return statistics.median(scores) >= 1


def _compared(
    hosts: Sequence[Watched], cause: Cause, metric: str, what: str, sign: float = 1.0
) -> list[Straggler]:
    """Return the hosts with values far above the others; below them where `sign` is -1."""
    values = {host.process: newest_values(host, metric) for host in hosts}
    having = [host for host in hosts if values[host.process]]
    count = min((len(values[host.process]) for host in having), default=0)
    if len(having) < 2 or not count:
        return []
    matrix = sign * np.array([values[host.process][-count:] for host in having])
    is_latency = metric.endswith("_seconds")
    margin = np.median(np.abs(matrix), axis=0) * LATENCY_APART if is_latency else SHARE_APART
    return [
        _named(having[late.row], cause, _evidence(late, sign, what, is_share=not is_latency))
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
        host: The host to read.
        metric: A name of `METRICS`; for quantiles, the median is used.
        worst: Combines the values of its chips and links.
    """
    newest: list[float] = []
    for reading in host.readings:
        values = [
            sample.value
            for sample in reading.samples
            if sample.metric == metric and is_typical(sample.labels)
        ]
        if values:
            newest.append(worst(values))
    return newest[-NEWEST:]


def is_typical(labels: Mapping[str, str]) -> bool:
    """Return whether a sample is no quantile, or the median."""
    return labels.get("quantile", "0.5") == "0.5"


def _named(host: Watched, cause: Cause, evidence: str) -> Straggler:
    return Straggler(host=host.name, process=host.process, cause=cause, evidence=evidence)


WINDOW = 200  # steps that are compared
LATE = 0.05  # share of a step above which a host is late
COUNTS = 0.02  # share of the run's time from which a straggler is reported


@dataclass(frozen=True)
class HostRecords:
    """The records of one process.

    Attributes:
        process: Its index.
        steps: Oldest first; of a repeated step the later one counts.
        readings: Its monitor's readings, oldest first.
    """

    process: int
    steps: Sequence[HostStep] = ()
    readings: Sequence[Reading] = field(default_factory=tuple)

    @property
    def name(self) -> str:
        """The machine's name; the process index where no record has it."""
        named = [step.host for step in self.steps[-1:]] + [
            reading.host for reading in self.readings[-1:]
        ]
        return next((name for name in named if name), f"process {self.process}")


def read_host_steps(
    run_dir: Path, process: int, *, size: int, since: float = 0.0
) -> list[HostStep]:
    """Return the steps in the last `size` bytes of a process's records, from a time on."""
    lines, _ = try_read_end(steps_file(run_dir, process), size, inside=run_dir)
    return [step for step in parse_steps(lines) if step.time >= since]


def detect_stragglers(hosts: Sequence[HostRecords]) -> StragglerReport:
    """Compare hosts, and return the slow ones.

    Args:
        hosts: At least two to compare.
    """
    recorded = [host for host in hosts if host.steps]
    notes = [f"{host.name} has recorded no step" for host in hosts if not host.steps]
    if len(hosts) < 2:
        return StragglerReport(
            found=(), hosts=len(hosts), steps=0, notes=("a single host cannot be compared",)
        )
    tables = [{step.step: step for step in host.steps} for host in recorded]
    common = sorted(set.intersection(*(set(table) for table in tables))) if tables else []
    stragglers: list[Straggler] = []
    if len(recorded) > 1 and common:
        stragglers = _judge_steps(recorded, tables, common)
    elif len(recorded) > 1:
        notes.append("the hosts have no step in common yet")
    named = {straggler.process for straggler in stragglers}
    by_chips = judge_readings(hosts, explained=bool(stragglers))
    stragglers += [straggler for straggler in by_chips if straggler.process not in named]
    return StragglerReport(
        found=tuple(stragglers),
        hosts=len(hosts),
        steps=min(len(common), WINDOW),
        notes=tuple(notes),
    )


def _judge_steps(
    hosts: Sequence[HostRecords], tables: Sequence[Mapping[int, HostStep]], common: Sequence[int]
) -> list[Straggler]:
    steps = common[-WINDOW:]
    saves = [step for step in common if any(table[step].checkpoint_s > 0 for table in tables)]
    saves = saves[-WINDOW:]

    def matrix(value: Callable[[HostStep], float], numbers: Sequence[int]) -> Matrix:
        return np.array([[value(table[number]) for number in numbers] for table in tables])

    took = matrix(lambda step: step.step_time_s, steps)
    usual = float(np.median(took))
    if usual <= 0:
        return []

    def late(
        cause: Cause,
        values: Matrix,
        what: str,
        *,
        spread: float = 1.0,
        among: Sequence[HostRecords] = hosts,
    ) -> list[Straggler]:
        """Return the hosts that are late by `values`, which are one per `spread` steps."""
        return [
            _straggler(among[host.row], cause, host, what, host.excess / (usual * spread))
            for host in stands_out(values, LATE * usual)
            if host.excess >= COUNTS * usual * spread
        ]

    stalled = matrix(lambda step: min(step.input_stall_s, step.step_time_s), steps)
    stragglers = late("input", stalled, "of idle chips without input")
    if len(saves) > 1:
        spread = (common[-1] - common[0] + 1) / len(saves)
        values = matrix(lambda step: step.checkpoint_s, saves)
        stragglers += late("checkpoint", values, "in the call that saves", spread=spread)
    if not stragglers:
        stragglers += late(
            "host", matrix(lambda step: step.dispatch_s, steps), "to dispatch a step"
        )
    # A late host makes all steps longer, which hides its own compute time, so it is not compared.
    named = {straggler.process for straggler in stragglers}
    rest = [at for at, host in enumerate(hosts) if host.process not in named]
    if len(rest) > 1:
        among, apart = [hosts[at] for at in rest], _excess(took[rest])
        # Only for steps that are not synchronous: both the step and the host's own part must take
        # longer,
        longer = np.minimum(apart, _excess(took[rest] - stalled[rest])).clip(min=0.0)
        usually = np.median(took[rest], axis=0)
        slower = late("chip", longer + usually, "for a step of its own", among=among)
        # and so must all steps in total, or a host that is late in one step is early in another.
        total = dict(zip([host.process for host in among], apart.mean(axis=1), strict=True))
        stragglers += [
            straggler for straggler in slower if total[straggler.process] >= COUNTS * usual
        ]
    best: dict[int, Straggler] = {}
    for straggler in sorted(stragglers, key=lambda straggler: -(straggler.share or 0.0)):
        best.setdefault(straggler.process, straggler)
    return list(best.values())


def _excess(values: Matrix) -> Matrix:
    others = [np.median(np.delete(values, at, axis=0), axis=0) for at in range(len(values))]
    return values - np.array(others)


def _straggler(host: HostRecords, cause: Cause, late: Late, what: str, share: float) -> Straggler:
    evidence = (
        f"{late.value:.3g} s {what}, the others {late.others:.3g} s; late in {late.share:.0%} of "
        "the samples"
    )
    return Straggler(
        host=host.name, process=host.process, cause=cause, evidence=evidence, share=share
    )

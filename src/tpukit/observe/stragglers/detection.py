"""Names the slow host of a run and its cause, from the hosts' own records.

In synchronous training every step ends on all hosts together: the collectives of the step make all
chips wait for the last one. So step times say nothing about who is slow. What differs is what each
host did itself before it handed its step to its chips, and what its chips say:

| cause | what shows it |
|---|---|
| input | its chips stood idle while it waited for its rows (`input_stall_s`) |
| checkpoint | its call to save took longer (`checkpoint_s`), save after save |
| host | it took longer to dispatch (`dispatch_s`), or its chips are left idle more than others |
| link | its ICI links report errors, or its transfers between slices take longer |
| chip | its chips report throttling; or it is the one whose collectives never wait: the others' \
do, for it; or, where steps are not synchronous, its own compute takes longer |

Two traps. Input that is late but hidden behind the step before it costs nothing: only time in which
the chips were idle counts. And where dispatch itself waits for the other hosts (programs that run
while they are dispatched, as on CPUs), the fast hosts seem slow at dispatch: it is looked at only
when no host is slow at input or at saving. A save that all hosts leave together (a barrier) does
not tell who was slow in it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ...records.host_steps import HostStep, parse_steps, steps_file
from ...records.lines import read_end
from ..readings import Reading
from .chip_signs import judge_readings
from .comparison import Late, Matrix, stands_out
from .report import Cause, Straggler, StragglerReport

WINDOW = 200  # steps that are compared
LATE = 0.05  # of a step, from which on a host is late in it
COUNTS = 0.02  # of the run's time, below which a straggler is not worth a name


@dataclass(frozen=True)
class HostRecords:
    """What one process left.

    Attributes:
        process: Its index.
        steps: Oldest first; of a step taken twice the later counts.
        readings: What its monitor said, oldest first.
    """

    process: int
    steps: Sequence[HostStep] = ()
    readings: Sequence[Reading] = field(default_factory=tuple)

    @property
    def name(self) -> str:
        """The machine's name; the process's number where no record says it."""
        named = [step.host for step in self.steps[-1:]] + [one.host for one in self.readings[-1:]]
        return next((name for name in named if name), f"process {self.process}")


def read_host_steps(
    run_dir: Path, process: int, *, size: int, since: float = 0.0
) -> list[HostStep]:
    """Return the steps in the last bytes of a process's records, none of before a time."""
    lines, _ = read_end(steps_file(run_dir, process), size, inside=run_dir)
    return [step for step in parse_steps(lines) if step.time >= since]


def detect_stragglers(hosts: Sequence[HostRecords]) -> StragglerReport:
    """Compare hosts, and return those that hold the others up.

    Args:
        hosts: At least two, or there is nothing to compare.
    """
    recorded = [host for host in hosts if host.steps]
    notes = [f"{host.name} has recorded no step" for host in hosts if not host.steps]
    if len(hosts) < 2:
        return StragglerReport(
            found=(), hosts=len(hosts), steps=0, notes=("one host has nobody to be compared with",)
        )
    tables = [{step.step: step for step in host.steps} for host in recorded]
    common = sorted(set.intersection(*(set(table) for table in tables))) if tables else []
    found: list[Straggler] = []
    if len(recorded) > 1 and common:
        found = _judge_steps(recorded, tables, common)
    elif len(recorded) > 1:
        notes.append("the hosts have no step in common yet")
    named = {one.process for one in found}
    by_chips = judge_readings(hosts, explained=bool(found))
    found += [one for one in by_chips if one.process not in named]
    return StragglerReport(
        found=tuple(found), hosts=len(hosts), steps=min(len(common), WINDOW), notes=tuple(notes)
    )


def _judge_steps(
    hosts: Sequence[HostRecords], tables: Sequence[Mapping[int, HostStep]], common: Sequence[int]
) -> list[Straggler]:
    steps = common[-WINDOW:]
    saves = [step for step in common if any(table[step].checkpoint_s > 0 for table in tables)]
    saves = saves[-WINDOW:]

    def matrix(of: Callable[[HostStep], float], numbers: Sequence[int]) -> Matrix:
        return np.array([[of(table[number]) for number in numbers] for table in tables])

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
        """Those late by `values`, which come once in `spread` steps."""
        return [
            _straggler(among[one.at], cause, one, what, one.excess / (usual * spread))
            for one in stands_out(values, LATE * usual)
            if one.excess >= COUNTS * usual * spread
        ]

    stalled = matrix(lambda step: min(step.input_stall_s, step.step_time_s), steps)
    found = late("input", stalled, "of idle chips for want of input")
    if len(saves) > 1:
        spread = (common[-1] - common[0] + 1) / len(saves)
        values = matrix(lambda step: step.checkpoint_s, saves)
        found += late("checkpoint", values, "in the call that saves", spread=spread)
    if not found:
        found += late("host", matrix(lambda step: step.dispatch_s, steps), "to dispatch a step")
    # What the others waited for hides how long a late host's own part was, and it would never
    # seem slow by itself: it is not compared.
    named = {one.process for one in found}
    rest = [at for at, host in enumerate(hosts) if host.process not in named]
    if len(rest) > 1:
        among, apart = [hosts[at] for at in rest], _excess(took[rest])
        # Only where steps do not end together: both the step and its own part must take longer,
        longer = np.minimum(apart, _excess(took[rest] - stalled[rest])).clip(min=0.0)
        usually = np.median(took[rest], axis=0)
        slower = late("chip", longer + usually, "for a step of its own", among=among)
        # and all steps together: else who is late at one is as much early at another.
        total = dict(zip([host.process for host in among], apart.mean(axis=1), strict=True))
        found += [one for one in slower if total[one.process] >= COUNTS * usual]
    best: dict[int, Straggler] = {}
    for one in sorted(found, key=lambda one: -(one.share or 0.0)):
        best.setdefault(one.process, one)
    return list(best.values())


def _excess(values: Matrix) -> Matrix:
    others = [np.median(np.delete(values, at, axis=0), axis=0) for at in range(len(values))]
    return values - np.array(others)


def _straggler(host: HostRecords, cause: Cause, late: Late, what: str, share: float) -> Straggler:
    evidence = (
        f"{late.value:.3g} s {what}, the others {late.others:.3g} s; late in {late.share:.0%} of "
        "what was seen"
    )
    return Straggler(
        host=host.name, process=host.process, cause=cause, evidence=evidence, share=share
    )

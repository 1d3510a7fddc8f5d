"""The attempts of a run: recorded as events, and read from them.

An attempt has a beginning, the steps it reached, and where its time went. A killed attempt cannot
write that it ended. Its end is then the newest step that its host recorded, and the next attempt
writes it into the events before it begins (`close_killed`).
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..plain_data import JsonMapping
from .events import (
    ATTEMPT_ENDED,
    ATTEMPT_STARTED,
    PROGRESS_EVERY_S,
    Event,
    EventsFile,
    read_events,
)
from .host_steps import HostStep, HostSteps, read_newest_steps
from .ledger import Ledger
from .lines import is_number
from .names import EVENTS_FILE

KILLED = "killed"
# A clock that advanced this much more than the steps between two marks took has been set.
JUMP_S = 2 * PROGRESS_EVERY_S


@dataclass(frozen=True, slots=True)
class AttemptMark:
    """The progress of an attempt at one time."""

    time: float
    step: int
    wall_s: float
    productive_s: float
    uptime_s: float | None = None


@dataclass
class RunAttempt:
    """One start of a run, from its processes' beginning to their end.

    Attributes:
        number: 0, 1, …
        began: Unix seconds.
        first_step: The step it continues from.
        about: The other data of its "attempt started" event: devices, slice, prediction.
        reason: Why it ended; None without an end event.
        spent_s: Seconds by cause, as `Goodput.spent_s`.
        marks: Its progress over time, the last mark at the step it reached.
        steps_rolled_back: Steps that it rolled back itself.
        newest: Unix seconds of its newest event or step.
        newest_uptime_s: The same by its machine's uptime clock, which never jumps.
    """

    number: int
    began: float
    first_step: int
    about: JsonMapping
    reason: str | None = None
    spent_s: dict[str, float] = field(default_factory=dict[str, float])
    marks: list[AttemptMark] = field(default_factory=list[AttemptMark])
    steps_rolled_back: int = 0
    newest: float = 0.0
    newest_uptime_s: float | None = None

    def __post_init__(self) -> None:
        given = self.about.get("uptime_s")
        uptime_s = float(given) if is_number(given) else None
        self.marks.append(AttemptMark(self.began, self.first_step, 0.0, 0.0, uptime_s))
        self.newest, self.newest_uptime_s = max(self.newest, self.began), uptime_s

    @property
    def step(self) -> int:
        """The last step it reached."""
        return self.marks[-1].step

    @property
    def productive_s(self) -> float:
        """Seconds in steps that the attempt did not roll back."""
        return self.marks[-1].productive_s

    @property
    def wall_s(self) -> float:
        """Seconds from its beginning to its newest event or step."""
        last = self.marks[-1]
        since_s = self.newest - last.time
        if last.uptime_s is not None and self.newest_uptime_s is not None:
            since_s = self.newest_uptime_s - last.uptime_s
        seen = last.wall_s + max(0.0, since_s)
        # A clock that was set back shows less time than was spent.
        return max(seen, self.productive_s + sum(self.spent_s.values()))

    def gap_s(self, before: "RunAttempt") -> float:
        """Return the seconds between the end of the attempt before it and its beginning."""
        began, ended = self.marks[0].uptime_s, before.newest_uptime_s
        boot = self.about.get("boot")
        if boot and boot == before.about.get("boot") and began is not None and ended is not None:
            return max(0.0, began - ended)
        return max(0.0, self.began - before.newest)

    def productive_up_to(self, step: int) -> float:
        """Return the seconds of its steps up to `step`, interpolated between two marks."""
        before = self.marks[0]
        if step <= before.step:
            return 0.0
        for mark in self.marks[1:]:
            if step <= mark.step:
                share = (step - before.step) / max(1, mark.step - before.step)
                return before.productive_s + share * (mark.productive_s - before.productive_s)
            before = mark
        return self.productive_s

    def add(self, event: Event) -> None:
        """Add an event of this attempt."""
        self.newest = max(self.newest, event.time)
        uptime_s = event.number("uptime_s")
        if uptime_s is not None:
            self.newest_uptime_s = max(uptime_s, self.newest_uptime_s or uptime_s)
        if event.event == "spent":
            self.spend(str(event.data.get("what", "other")), event.number("seconds") or 0.0)
            return
        if event.event == "rolled back":
            self.steps_rolled_back += max(0, int(event.number("lost_steps") or 0))
        if event.event == ATTEMPT_ENDED:
            self.reason = str(event.data.get("reason", "ended"))
            self.newest = event.time  # a clock may have been set back meanwhile
        productive, wall = event.number("productive_s"), event.number("wall_s")
        step = event.number("step")
        if productive is None or wall is None or step is None:
            return
        self._mark(AttemptMark(event.time, int(step), wall, max(0.0, productive), uptime_s))

    def add_steps(self, steps: Iterable[HostStep]) -> None:
        """Add the steps that the host recorded after the last mark."""
        last = self.marks[-1]
        newest, productive, step = last.time, last.productive_s, last.step
        took_s = 0.0
        for recorded in steps:
            if recorded.time > last.time and recorded.step > step:
                stalled = min(recorded.input_stall_s, recorded.step_time_s)
                productive += recorded.step_time_s - stalled
                self.spend("input_stall", stalled)
                newest, step = recorded.time, recorded.step
                took_s += recorded.step_time_s + recorded.checkpoint_s
        if step == last.step:
            return
        since_s = newest - last.time
        if since_s > 2 * took_s + JUMP_S:
            since_s = took_s  # the clock was set; steps are timed by a clock that never jumps
        uptime_s = None if last.uptime_s is None else last.uptime_s + since_s
        if uptime_s is not None:
            self.newest_uptime_s = max(uptime_s, self.newest_uptime_s or uptime_s)
        self.newest = max(self.newest, newest)
        self._mark(AttemptMark(newest, step, last.wall_s + since_s, productive, uptime_s))

    def spend(self, what: str, seconds: float) -> None:
        """Add seconds to a cause."""
        self.spent_s[what] = self.spent_s.get(what, 0.0) + max(0.0, seconds)

    def _mark(self, mark: AttemptMark) -> None:
        while len(self.marks) > 1 and self.marks[-1].step > mark.step:
            self.marks.pop()  # rolled back
        if len(self.marks) > 2 and self.marks[-1].step == mark.step:
            self.marks.pop()
        self.marks.append(mark)


def attempts_of(events: Iterable[Event]) -> list[RunAttempt]:
    """Return the attempts in some events, in order."""
    attempts: list[RunAttempt] = []
    for event in events:
        if event.event == ATTEMPT_STARTED:
            first = int(event.number("step") or 0)
            attempts.append(RunAttempt(len(attempts), event.time, first, dict(event.data)))
        elif attempts:
            attempts[-1].add(event)
    return attempts


def read_attempts(run_dir: Path, events: Iterable[Event]) -> list[RunAttempt]:
    """Return the attempts of a run directory, an unfinished one up to its newest step."""
    attempts = attempts_of(events)
    if attempts and attempts[-1].reason is None:
        last = attempts[-1]
        last.add_steps(read_newest_steps(run_dir, 0, since=last.marks[-1].time))
    return attempts


def close_killed(run_dir: Path, file: EventsFile) -> int:
    """Write the end of a killed last attempt, if there is one; return the number of attempts."""
    attempts = attempts_of(read_events(run_dir / EVENTS_FILE))
    if not attempts or attempts[-1].reason is not None:
        return len(attempts)
    last = attempts[-1]
    known = last.spent_s.get("input_stall", 0.0)
    last.add_steps(read_newest_steps(run_dir, 0, since=last.marks[-1].time))
    stalled = last.spent_s.get("input_stall", 0.0) - known
    if stalled > 0:
        file.write(
            "spent",
            at=last.newest,
            uptime_s=last.newest_uptime_s,
            what="input_stall",
            seconds=stalled,
        )
    file.write(
        ATTEMPT_ENDED,
        at=last.newest,
        uptime_s=last.newest_uptime_s,
        reason=KILLED,
        step=last.step,
        wall_s=last.wall_s,
        productive_s=last.productive_s,
        seen_by=len(attempts),
    )
    return len(attempts)


class AttemptRecorder:
    """Writes an attempt while it runs: events on process 0, steps on every process.

    Args:
        run_dir: The run's folder.
        process: Index of this process; only process 0 writes events.
        ledger: Adds up the attempt's time; what it books after `start` is written as events.
    """

    def __init__(self, run_dir: Path, *, process: int, ledger: Ledger) -> None:
        self._run_dir, self._ledger = run_dir, ledger
        self._events = EventsFile(run_dir / EVENTS_FILE) if process == 0 else None
        self._steps = HostSteps(run_dir, process)
        self._step = 0
        self._stalled_s = 0.0  # already written
        self._marked = 0.0
        self._started = False

    def start(self, *, step: int, **about: Any) -> None:
        """Write that the attempt begins, with the time it has taken until now.

        Args:
            step: The step it continues from, 0 for a new run.
            **about: Devices, slice, prediction and other facts for readers.
        """
        self._step, self._started = step, True
        if self._events is None:
            return
        so_far = self._ledger.goodput()
        number = close_killed(self._run_dir, self._events)
        began = time.time() - so_far.wall_s
        self._events.write(
            ATTEMPT_STARTED,
            at=began,
            uptime_s=time.monotonic() - so_far.wall_s,
            boot=_boot(),
            attempt=number,
            step=step,
            **about,
        )
        for what, seconds in so_far.spent_s.items():
            self._events.write("spent", what=what, seconds=seconds)
        self._ledger.on_booked = self._spent
        self._marked = time.monotonic()

    def stepped(self, step: int, **seconds: float) -> None:
        """Record a completed step; `seconds` are the arguments of `HostSteps.add`."""
        self._step = step
        self._steps.add(step, **seconds)
        if self._events is not None and time.monotonic() - self._marked >= PROGRESS_EVERY_S:
            self._mark("progress")

    def saved(self, step: int) -> None:
        """Write that the checkpoint of a step was handed to its writer."""
        self._steps.flush()
        self._step = step
        self._mark("saved")

    def rolled_back(self, to_step: int) -> None:
        """Write that the steps after `to_step` no longer count."""
        lost, self._step = self._step - to_step, to_step
        self._steps.flush()
        self._mark("rolled back", lost_steps=lost)

    def happened(self, event: str, **data: Any) -> None:
        """Write any other event: "preempted", "recompiled", "note"."""
        if self._events is not None and self._started:
            self._events.write(event, step=self._step, **data)

    def end(self, reason: str, **data: Any) -> None:
        """Write that the attempt ends, and why; later calls do nothing."""
        if self._started:
            self._mark(ATTEMPT_ENDED, reason=reason, **data)
            self._started = False

    def close(self) -> None:
        """Write the waiting steps, and close the files."""
        self._ledger.on_booked = None
        self._steps.close()
        if self._events is not None:
            self._events.close()

    def _spent(self, what: str, seconds: float) -> None:
        if self._events is not None:
            self._events.write("spent", what=what, seconds=seconds)

    def _mark(self, event: str, **data: Any) -> None:
        if self._events is None:
            return
        now = self._ledger.goodput()
        stalled = now.spent_s.get("input_stall", 0.0)
        if stalled > self._stalled_s:
            self._events.write("spent", what="input_stall", seconds=stalled - self._stalled_s)
            self._stalled_s = stalled
        figures: JsonMapping = {
            "step": self._step,
            "wall_s": now.wall_s,
            "productive_s": now.productive_s,
        }
        self._events.write(event, **figures, **data)
        self._marked = time.monotonic()


def _boot() -> str:
    """Return the id of this machine's current boot; "" where the system has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""

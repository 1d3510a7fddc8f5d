"""The attempts of a run, from its events: when each began, how far it came, where its time went.

An attempt that was killed could not say that it ended. Its last word is then the newest step that
its host recorded, and the next attempt writes that down before it begins (`close_killed`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..runtime.run_files import EVENTS_FILE
from .events import PROGRESS_EVERY_S, Event, EventsFile, read_events
from .host_steps import HostStep, read_newest_steps

KILLED = "killed"
# Beyond what steps themselves took, a clock that says more than this between two marks was set.
JUMP_S = 2 * PROGRESS_EVERY_S


@dataclass(frozen=True, slots=True)
class AttemptMark:
    """How far an attempt had come at some time."""

    time: float
    step: int
    wall_s: float
    productive_s: float
    uptime_s: float | None = None


@dataclass
class RunAttempt:
    """One process group's try at a run.

    Attributes:
        number: 0, 1, …
        began: Unix seconds.
        first_step: The step it begins after.
        about: What else "attempt started" said: devices, slice, prediction.
        reason: Why it ended; None while nobody said so.
        spent_s: Seconds by what they went into, as `Goodput.spent_s`.
        marks: How far it was when; the last is how far it came.
        steps_rolled_back: Steps it took back itself.
        newest: Unix seconds of its last sign of life.
        newest_uptime_s: The same on the clock of its machine, which never jumps.
    """

    number: int
    began: float
    first_step: int
    about: Mapping[str, Any]
    reason: str | None = None
    spent_s: dict[str, float] = field(default_factory=dict[str, float])
    marks: list[AttemptMark] = field(default_factory=list[AttemptMark])
    steps_rolled_back: int = 0
    newest: float = 0.0
    newest_uptime_s: float | None = None

    def __post_init__(self) -> None:
        uptime_s = _number(self.about.get("uptime_s"))
        self.marks.append(AttemptMark(self.began, self.first_step, 0.0, 0.0, uptime_s))
        self.newest, self.newest_uptime_s = max(self.newest, self.began), uptime_s

    @property
    def step(self) -> int:
        """The step that it reached."""
        return self.marks[-1].step

    @property
    def productive_s(self) -> float:
        """Seconds in steps that the attempt itself did not take back."""
        return self.marks[-1].productive_s

    @property
    def wall_s(self) -> float:
        """Seconds from its beginning to its last sign of life."""
        last = self.marks[-1]
        since_s = self.newest - last.time
        if last.uptime_s is not None and self.newest_uptime_s is not None:
            since_s = self.newest_uptime_s - last.uptime_s
        seen = last.wall_s + max(0.0, since_s)
        # A clock that was set back says less than what was spent.
        return max(seen, self.productive_s + sum(self.spent_s.values()))

    def gap_s(self, before: "RunAttempt") -> float:
        """Seconds from the last sign of life of the attempt before it to its beginning."""
        began, ended = self.marks[0].uptime_s, before.newest_uptime_s
        boot = self.about.get("boot")
        if boot and boot == before.about.get("boot") and began is not None and ended is not None:
            return max(0.0, began - ended)
        return max(0.0, self.began - before.newest)

    def productive_up_to(self, step: int) -> float:
        """Seconds of its steps up to one, in proportion between two marks."""
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
        """Take in an event of this attempt."""
        self.newest = max(self.newest, event.time)
        uptime_s = event.number("uptime_s")
        if uptime_s is not None:
            self.newest_uptime_s = max(uptime_s, self.newest_uptime_s or uptime_s)
        if event.event == "spent":
            self.spend(str(event.data.get("what", "other")), event.number("seconds") or 0.0)
            return
        if event.event == "rolled back":
            self.steps_rolled_back += max(0, int(event.number("lost_steps") or 0))
        if event.event == "attempt ended":
            self.reason = str(event.data.get("reason", "ended"))
            self.newest = event.time  # a clock may have been set back meanwhile
        productive, wall = event.number("productive_s"), event.number("wall_s")
        step = event.number("step")
        if productive is None or wall is None or step is None:
            return
        self._mark(AttemptMark(event.time, int(step), wall, max(0.0, productive), uptime_s))

    def add_steps(self, steps: Iterable[HostStep]) -> None:
        """Take in what the host recorded after the last mark."""
        last = self.marks[-1]
        newest, productive, step = last.time, last.productive_s, last.step
        took_s = 0.0
        for one in steps:
            if one.time > last.time and one.step > step:
                stalled = min(one.input_stall_s, one.step_time_s)
                productive += one.step_time_s - stalled
                self.spend("input_stall", stalled)
                newest, step = one.time, one.step
                took_s += one.step_time_s + one.checkpoint_s
        if step == last.step:
            return
        since_s = newest - last.time
        if since_s > 2 * took_s + JUMP_S:
            since_s = took_s  # the clock was set: steps are timed by one that never jumps
        uptime_s = None if last.uptime_s is None else last.uptime_s + since_s
        if uptime_s is not None:
            self.newest_uptime_s = max(uptime_s, self.newest_uptime_s or uptime_s)
        self.newest = max(self.newest, newest)
        self._mark(AttemptMark(newest, step, last.wall_s + since_s, productive, uptime_s))

    def spend(self, what: str, seconds: float) -> None:
        """Book seconds under a name."""
        self.spent_s[what] = self.spent_s.get(what, 0.0) + max(0.0, seconds)

    def _mark(self, mark: AttemptMark) -> None:
        while len(self.marks) > 1 and self.marks[-1].step > mark.step:
            self.marks.pop()  # rolled back
        if len(self.marks) > 2 and self.marks[-1].step == mark.step:
            self.marks.pop()
        self.marks.append(mark)


def attempts_of(events: Iterable[Event]) -> list[RunAttempt]:
    """Return the attempts that events speak of, in order."""
    attempts: list[RunAttempt] = []
    for event in events:
        if event.event == "attempt started":
            first = int(event.number("step") or 0)
            attempts.append(RunAttempt(len(attempts), event.time, first, dict(event.data)))
        elif attempts:
            attempts[-1].add(event)
    return attempts


def read_attempts(run_dir: Path, events: Iterable[Event]) -> list[RunAttempt]:
    """Return the attempts of a run directory, the last up to its newest recorded step."""
    attempts = attempts_of(events)
    if attempts and attempts[-1].reason is None:
        last = attempts[-1]
        last.add_steps(read_newest_steps(run_dir, 0, since=last.marks[-1].time))
    return attempts


def close_killed(run_dir: Path, file: EventsFile) -> int:
    """Write the end of an attempt that could not, if there is one; return how many there were."""
    attempts = attempts_of(read_events(run_dir / EVENTS_FILE))
    if not attempts or attempts[-1].reason is not None:
        return len(attempts)
    last = attempts[-1]
    said = last.spent_s.get("input_stall", 0.0)
    last.add_steps(read_newest_steps(run_dir, 0, since=last.marks[-1].time))
    stalled = last.spent_s.get("input_stall", 0.0) - said
    if stalled > 0:
        file.write(
            "spent",
            at=last.newest,
            uptime_s=last.newest_uptime_s,
            what="input_stall",
            seconds=stalled,
        )
    file.write(
        "attempt ended",
        at=last.newest,
        uptime_s=last.newest_uptime_s,
        reason=KILLED,
        step=last.step,
        wall_s=last.wall_s,
        productive_s=last.productive_s,
        seen_by=len(attempts),
    )
    return len(attempts)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None

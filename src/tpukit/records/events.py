"""`events.jsonl`: what happened to a run, attempt after attempt; no line is ever removed.

| event | data |
|---|---|
| attempt started | `attempt` (0, 1, …), the `step` it continues from, `total_steps`, devices … |
| spent | `seconds` spent on `what`, a name of `Goodput.spent_s` |
| save failed | `failed_step`, whose checkpoint was not written, and the last `good_step` |
| progress, saved | the `step` reached, the attempt's `wall_s` and `productive_s` up to it |
| rolled back | the `step` it returned to, `lost_steps`, and the same two times |
| preempted, recompiled, note | their own data |
| attempt ended | `reason`, step and times; `seen_by` where a later attempt wrote it after a kill |

Each line goes to the operating system at once, so a kill loses none. `wall_s` is measured by a
clock that never jumps, and so is `uptime_s` of every line, which counts from the machine's start
(`boot`). A full disk delays events and never stops the run.
"""

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..plain_data import JsonMapping, JsonObject
from ..runtime.plain_files import read_plain
from ..shown import Shown
from .lines import AppendedLines, is_number, is_time, parse_lines

# Seconds between two "progress" events; later steps are in the host's step records.
PROGRESS_EVERY_S = 60.0
ATTEMPT_STARTED, ATTEMPT_ENDED = "attempt started", "attempt ended"


@dataclass(frozen=True, slots=True)
class Event(Shown):
    """One line of the file.

    Attributes:
        time: Unix seconds.
        event: What happened: "attempt started", "spent", "saved" …
        data: The line's other values.
    """

    time: float
    event: str
    data: JsonMapping = field(default_factory=JsonObject)

    @classmethod
    def from_dict(cls, line: JsonMapping) -> "Event | None":
        """Read what `to_dict` wrote; None for anything else."""
        at, event = line.get("time"), line.get("event")
        if not isinstance(event, str) or not is_time(at):
            return None
        rest = dict(line)
        del rest["time"], rest["event"]
        return cls(float(at), event, rest)

    def number(self, name: str) -> float | None:
        """Return a finite number of the line; None where it has none of that name."""
        value = self.data.get(name)
        return float(value) if is_number(value) else None

    def to_dict(self) -> JsonObject:
        """Return the event as the file has it."""
        return {"time": self.time, "event": self.event, **self.data}


class EventsFile:
    """Appends events; process 0 of a run has one."""

    def __init__(self, path: Path) -> None:
        self._lines = AppendedLines(path)

    def write(
        self, event: str, *, at: float | None = None, uptime_s: float | None = None, **data: Any
    ) -> None:
        """Append one event of now, or of another time given as `at` and `uptime_s`."""
        if at is None:
            at, uptime_s = time.time(), time.monotonic()
        if uptime_s is not None:
            data["uptime_s"] = round(uptime_s, 3)
        line = Event(at, event, data).to_dict()
        self._lines.write(json.dumps(line, ensure_ascii=False) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def good_saves(events: Iterable[Event]) -> list[Event]:
    """Return the "saved" events, without those whose checkpoint later turned out to have failed."""
    good: dict[float | None, Event] = {}
    for event in events:
        if event.event == "saved":
            good[event.number("step")] = event
        elif event.event == "save failed":
            good.pop(event.number("failed_step"), None)
    return sorted(good.values(), key=lambda event: event.time)


def read_events(path: Path) -> list[Event]:
    """Return the events of a file; none where it cannot be read."""
    try:
        lines = read_plain(path).split(b"\n")
    except OSError:
        return []
    return list(parse_events(lines))


def parse_events(lines: Sequence[bytes]) -> Iterator[Event]:
    """Yield the events in some lines; a line that a kill cut short is skipped."""
    for record in parse_lines(lines):
        event = Event.from_dict(record) if record else None
        if event is not None:
            yield event

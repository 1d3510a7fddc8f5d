"""`events.jsonl`: what happened to a run, attempt after attempt; nothing is ever taken out of it.

| event | what it says |
|---|---|
| attempt started | `attempt` (0, 1, …), the `step` it begins after, `total_steps`, devices … |
| spent | `seconds` that went into `what`, a name of `Goodput.spent_s` |
| save failed | `failed_step`, whose checkpoint was not written, and the last `good_step` |
| progress, saved | the `step` that is reached, the attempt's `wall_s` and `productive_s` up to it |
| rolled back | from which step to which, and the same two |
| preempted, recompiled, note | as they say |
| attempt ended | `reason`, and the same three; `seen_by` says who wrote it for a killed attempt |

A line goes to the operating system at once, so a kill loses none. `wall_s` is of a clock that never
jumps, and so is `uptime_s` of every line, which counts from the start of the machine (`boot`). A
full disk delays events and never stops the run.
"""

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from ..runtime.plain_files import read_plain
from ..runtime.run_tail import is_number, is_time
from ..shown import Shown
from .lines import AppendedLines

# Seconds between two lines of progress; what came after the last is in the host's step records.
PROGRESS_EVERY_S = 60.0


@dataclass(frozen=True, slots=True)
class Event(Shown):
    """One line of the file.

    Attributes:
        time: Unix seconds.
        event: What happened: "attempt started", "spent", "saved" …
        data: Everything else the line says.
    """

    time: float
    event: str
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])

    @classmethod
    def from_dict(cls, line: Mapping[str, Any]) -> "Event | None":
        """Read what `to_dict` wrote; None when it is no event."""
        at, event = line.get("time"), line.get("event")
        if not isinstance(event, str) or not is_time(at):
            return None
        rest = dict(line)
        del rest["time"], rest["event"]
        return cls(float(at), event, rest)

    def number(self, name: str) -> float | None:
        """Return a finite number of the line; None when it has none of that name."""
        value = self.data.get(name)
        return float(value) if is_number(value) else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data, as in the file."""
        return {"time": self.time, "event": self.event, **self.data}


class EventsFile:
    """Appends events; one for each run, on process 0."""

    def __init__(self, path: Path) -> None:
        self._lines = AppendedLines(path)

    def write(
        self, event: str, *, at: float | None = None, uptime_s: float | None = None, **data: Any
    ) -> None:
        """Append one event, of now unless `at` says another time, and `uptime_s` the same."""
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
    """Return the "saved" events whose checkpoint was not found to have failed afterwards."""
    good: dict[float | None, Event] = {}
    for event in events:
        if event.event == "saved":
            good[event.number("step")] = event
        elif event.event == "save failed":
            good.pop(event.number("failed_step"), None)
    return sorted(good.values(), key=lambda event: event.time)


def read_events(path: Path) -> list[Event]:
    """Return the events of a file; none when it is not there."""
    try:
        lines = read_plain(path).split(b"\n")
    except OSError:
        return []
    return list(parse_events(lines))


def parse_events(lines: list[bytes]) -> Iterator[Event]:
    """Yield the events that lines hold; those a kill cut short are passed over."""
    for line in lines:
        try:
            data = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(data, dict):
            event = Event.from_dict(cast("dict[str, Any]", data))
            if event is not None:
                yield event

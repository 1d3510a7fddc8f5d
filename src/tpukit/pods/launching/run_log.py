"""The log of a run: what its supervisor was told, one JSON object a line.

Whoever shows a run reads this file, whether the run was started a moment ago in the same terminal
or yesterday in another one.
"""

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...hardware.figure import count_text
from ...runtime.files import private_folder
from ..providers.protocol import Ended, Line, Restarted, StepCompleted
from ..supervision.events import (
    AttemptBegan,
    AttemptEnded,
    PodAsked,
    PodReady,
    PodRefused,
    PodReleased,
    SupervisionEvent,
)

FILE = "log.jsonl"
STEP_S = 0.2
"""How often a step is written down at most."""
POLL_S = 0.05
_NOISE = re.compile(r"\[Gloo\] Rank \d+ is connected to \d+ peer ranks")
"""Lines that every process of jax on CPUs prints, and that tell nothing of the job."""
FINAL = ("outcome", "error")
"""Kinds of entries after which nothing comes."""


@dataclass(frozen=True)
class RunLogEntry:
    """One thing that happened.

    Attributes:
        kind: "line" (a process printed), "step", "pod", "attempt", "note", "outcome" or "error".
        host: Whose it is, for lines and steps.
        text: In words.
        data: More, by kind.
    """

    kind: str
    text: str = ""
    host: str = ""
    at: float = field(default_factory=time.time)
    data: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def is_final(self) -> bool:
        """Whether nothing comes after it."""
        return self.kind in FINAL

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "at": self.at,
            "kind": self.kind,
            "host": self.host,
            "text": self.text,
            **({"data": self.data} if self.data else {}),
        }

    @classmethod
    def of(cls, event: SupervisionEvent) -> "RunLogEntry | None":
        """Return the log entry of an event; None where others tell the same, or it is noise."""
        match event:
            case Line(host, text):
                return None if _NOISE.match(text) else cls("line", text, host)
            case StepCompleted(host, step, loss):
                return cls("step", "", host, data={"step": step, "loss": loss})
            case PodAsked(name, zone):
                return cls("pod", f"asking for {name}{_in(zone)}")
            case PodRefused(name, zone, cause, reason):
                return cls("pod", f"no {name}{_in(zone)}: {cause.meaning} ({reason})")
            case PodReady(pod):
                hosts = count_text(len(pod.hosts), "host")
                return cls("pod", f"{pod.name} is ready{_in(pod.zone)}: {hosts}")
            case PodReleased(pod):
                return cls("pod", f"{pod.name}{_in(pod.zone)} is given back")
            case AttemptBegan(attempt):
                return cls("attempt", f"attempt {attempt.number} on {attempt.pod} begins")
            case AttemptEnded(attempt):
                return cls("attempt", f"attempt {attempt.number} ended: {attempt.ending}")
            case Restarted() | Ended():
                return None


def _in(zone: str) -> str:
    return f" in {zone}" if zone else ""


class RunLog:
    """Writes the log of a run.

    Args:
        folder: The run's; the file in it is for its owner alone, since jobs print what they like.
    """

    def __init__(self, folder: Path) -> None:
        private_folder(folder)
        self.path = folder / FILE
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self._file = os.fdopen(descriptor, "w", encoding="utf-8")
        self._step_at = 0.0
        self._held: RunLogEntry | None = None

    def tell(self, event: SupervisionEvent) -> None:
        """Write down an event; of steps that follow each other fast only some."""
        entry = RunLogEntry.of(event)
        if entry is None:
            return
        if entry.kind == "step" and entry.at - self._step_at < STEP_S:
            self._held = entry
            return
        if entry.kind == "step":
            self._step_at = entry.at
        elif entry.kind == "attempt":
            self.flush()
        self.write(entry)

    def flush(self) -> None:
        """Write the newest step, if it was not."""
        if self._held is not None:
            self.write(self._held)

    def write(self, entry: RunLogEntry) -> None:
        """Write down an entry."""
        if entry.kind == "step":
            self._held = None
        self._file.write(json.dumps(entry.to_dict()) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Write no more."""
        self.flush()
        self._file.close()


def read_log(
    folder: Path, *, is_running: Callable[[], bool], follow: bool
) -> Iterator[RunLogEntry]:
    """Yield the entries of a run's log.

    Args:
        folder: The run's.
        is_running: Whether somebody may still write.
        follow: Whether to wait for more, until there is a last one or nobody writes.
    """
    path = folder / FILE
    while not path.exists():
        if not follow or not is_running():
            return
        time.sleep(POLL_S)
    rest = ""
    with path.open(encoding="utf-8", errors="replace") as file:
        while True:
            alive = is_running()  # before reading: what it wrote last is read after it ended
            rest += file.read()
            *lines, rest = rest.split("\n")
            for line in lines:
                said = json.loads(line)
                entry = RunLogEntry(**said)
                yield entry
                if entry.is_final and follow:
                    return
            if not follow or not alive:
                return
            time.sleep(POLL_S)

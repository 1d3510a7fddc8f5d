"""The log of a run as JSON lines, and the result that its last entry gives.

Commands that show a run read this file, whichever terminal started the run.
"""

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import ConfigError, PodUnavailable, ProviderError, TPUError
from ...exit_codes import ExitCode
from ...hardware.figure import count_text
from ...runtime.files import private_folder
from ...shown import Shown
from ..causes import Cause, Kind
from ..cost import CostReport
from ..providers.protocol import Ended, Line, Restarted, StepCompleted
from ..supervision.journal import (
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
"""Shortest interval between two entries for steps."""
POLL_S = 0.05
_NOISE = re.compile(r"\[Gloo\] Rank \d+ is connected to \d+ peer ranks")
"""Lines that every jax process on CPUs prints, without information about the job."""
FINAL = ("outcome", "error")
"""Kinds of entries that end a log."""


@dataclass(frozen=True)
class RunLogEntry:
    """An event of a run.

    Attributes:
        kind: "line" (output of a process), "step", "pod", "attempt", "note", "outcome" or "error".
        host: Host of a line or step.
        text: Description for people.
        data: Further values, depending on the kind.
    """

    kind: str
    text: str = ""
    host: str = ""
    at: float = field(default_factory=time.time)
    data: dict[str, Any] = field(default_factory=dict[str, Any])

    @property
    def is_final(self) -> bool:
        """Whether it is the last entry."""
        return self.kind in FINAL

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "at": self.at,
            "kind": self.kind,
            "host": self.host,
            "text": self.text,
            **({"data": self.data} if self.data else {}),
        }

    @classmethod
    def of(cls, event: SupervisionEvent) -> "RunLogEntry | None":
        """Return the entry for an event; None for noise and for events that others repeat."""
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
                return cls("pod", f"{pod.name}{_in(pod.zone)} is released")
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
        folder: The run's folder. Only its owner can read the file, because jobs may print secrets.
    """

    def __init__(self, folder: Path) -> None:
        private_folder(folder)
        self.path = folder / FILE
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self._file = os.fdopen(descriptor, "w", encoding="utf-8")
        self._step_at = 0.0
        self._held: RunLogEntry | None = None

    def tell(self, event: SupervisionEvent) -> None:
        """Write an event, or skip it if it is a step soon after another."""
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
        """Write the newest step, if it was skipped."""
        if self._held is not None:
            self.write(self._held)

    def write(self, entry: RunLogEntry) -> None:
        """Write an entry."""
        if entry.kind == "step":
            self._held = None
        self._file.write(json.dumps(entry.to_dict()) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self.flush()
        self._file.close()


def read_log(
    folder: Path, *, is_running: Callable[[], bool], follow: bool
) -> Iterator[RunLogEntry]:
    """Yield the entries of a run's log.

    Args:
        folder: The run's folder.
        is_running: Returns whether a process may still write.
        follow: Whether to wait for new entries until the last one, or until no process writes.
    """
    path = folder / FILE
    while not path.exists():
        if not follow or not is_running():
            return
        time.sleep(POLL_S)
    rest = ""
    with path.open(encoding="utf-8", errors="replace") as file:
        while True:
            alive = is_running()  # asked before reading, so that the last entries are read too
            rest += file.read()
            *lines, rest = rest.split("\n")
            for line in lines:
                values = json.loads(line)
                entry = RunLogEntry(**values)
                yield entry
                if entry.is_final and follow:
                    return
            if not follow or not alive:
                return
            time.sleep(POLL_S)


_BY_CAUSE = {
    Cause.DIVERGED: ExitCode.DIVERGED,
    Cause.OUT_OF_MEMORY: ExitCode.OUT_OF_MEMORY,
    Cause.BAD_INPUT: ExitCode.BAD_INPUT,
}


_BY_KIND = {
    Kind.DONE: ExitCode.DONE,
    Kind.APPLICATION: ExitCode.FAILED,
    Kind.CAPACITY: ExitCode.NO_CAPACITY,
    Kind.INFRASTRUCTURE: ExitCode.GAVE_UP,
    Kind.EVICTION: ExitCode.GAVE_UP,
}


def code_of_cause(cause: Cause) -> int:
    """Return the exit code of `tpukit launch` for the cause for which a job ended."""
    return int(_BY_CAUSE.get(cause, _BY_KIND[cause.kind]))


def code_of(error: TPUError) -> int:
    """Return the exit code for an error that ended a run before its job did."""
    match error:
        case ConfigError():
            return int(ExitCode.BAD_INPUT)
        case PodUnavailable():
            return ExitCode.NO_CAPACITY
        case ProviderError():
            return ExitCode.GAVE_UP
        case _:
            return int(ExitCode.BAD_INPUT)


@dataclass(frozen=True)
class LaunchResult(Shown):
    """How a run ended, and its cost.

    Attributes:
        entry: The supervisor's last entry.
    """

    name: str
    entry: RunLogEntry
    cost: CostReport

    @property
    def cause(self) -> Cause | None:
        """Why the run ended; None if its supervisor failed."""
        ending = self.entry.data.get("ending")
        return None if ending is None else Cause(ending["cause"])

    @property
    def exit_code(self) -> int:
        """The exit code of `tpukit launch`.

        0 done, or stopped and saved; 1 failed; 2 refused input; 3 diverged; 4 out of memory; 5 no
        zone has capacity; 6 gave up after failures or an eviction, could not reach the provider, or
        the supervisor was killed.
        """
        if self.entry.kind == "error":
            return int(self.entry.data.get("code", ExitCode.BAD_INPUT))
        assert self.cause is not None
        return code_of_cause(self.cause)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "name": self.name,
            "exit_code": self.exit_code,
            "text": self.entry.text,
            **self.entry.data,
            "cost": self.cost.to_dict(),
        }

    def __rich__(self) -> Any:
        from rich.text import Text

        data = self.entry.data
        reason = f" ({data['reason']})" if data.get("reason") else ""
        lines = [Text.assemble((self.name, "bold"), f": {self.entry.text}{reason}")]
        if attempts := len(data.get("attempts", ())):
            lost = sum(loss["lost_steps"] for loss in data["losses"])
            down_s = sum(loss["downtime_s"] or 0.0 for loss in data["losses"])
            again = f", {lost} steps done again, {down_s:.1f} s down" if attempts > 1 else ""
            lines.append(Text(f"{attempts} attempt{'s' * (attempts > 1)}{again}"))
        return Text("\n").join([*lines, Text(self.cost.summary)])

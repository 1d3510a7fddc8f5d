"""Writes down an attempt at a run while it goes on: events on process 0, steps on every process."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..runtime.run_files import EVENTS_FILE
from .attempts import close_killed
from .events import PROGRESS_EVERY_S, EventsFile
from .host_steps import HostSteps
from .ledger import Ledger


class AttemptRecorder:
    """Says to events.jsonl and to this host's steps.jsonl what an attempt does.

    Args:
        run_dir: The run's folder.
        process: Index of this process; only process 0 writes events.
        ledger: Where the attempt's time goes; it is followed from `start` on.
    """

    def __init__(self, run_dir: Path, *, process: int, ledger: Ledger) -> None:
        self._run_dir, self._ledger = run_dir, ledger
        self._events = EventsFile(run_dir / EVENTS_FILE) if process == 0 else None
        self._steps = HostSteps(run_dir, process)
        self._step = 0
        self._stalled_s = 0.0  # of which the file knows
        self._marked = 0.0
        self._started = False

    def start(self, *, step: int, **about: Any) -> None:
        """Say that the attempt begins after `step`, with the time it has taken until now.

        Args:
            step: That it goes on from, 0 for a new run.
            **about: Devices, slice, prediction and whatever else a reader may want to know.
        """
        self._step, self._started = step, True
        if self._events is None:
            return
        so_far = self._ledger.goodput()
        number = close_killed(self._run_dir, self._events)
        began = time.time() - so_far.wall_s
        self._events.write(
            "attempt started",
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
        """Record a step that has completed; `seconds` are those of `HostSteps.add`."""
        self._step = step
        self._steps.add(step, **seconds)
        if self._events is not None and time.monotonic() - self._marked >= PROGRESS_EVERY_S:
            self._mark("progress")

    def saved(self, step: int) -> None:
        """Say that a checkpoint of a step was handed to its writer."""
        self._steps.flush()
        self._step = step
        self._mark("saved")

    def rolled_back(self, to_step: int) -> None:
        """Say that the steps after one no longer count."""
        lost, self._step = self._step - to_step, to_step
        self._steps.flush()
        self._mark("rolled back", lost_steps=lost)

    def happened(self, event: str, **data: Any) -> None:
        """Say anything else: "preempted", "recompiled", "note"."""
        if self._events is not None and self._started:
            self._events.write(event, step=self._step, **data)

    def end(self, reason: str, **data: Any) -> None:
        """Say that the attempt ends, and why; only the first time counts."""
        if self._started:
            self._mark("attempt ended", reason=reason, **data)
            self._started = False

    def close(self) -> None:
        """Write what is left, and close the files."""
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
        figures: Mapping[str, Any] = {
            "step": self._step,
            "wall_s": now.wall_s,
            "productive_s": now.productive_s,
        }
        self._events.write(event, **figures, **data)
        self._marked = time.monotonic()


def _boot() -> str:
    """Return what tells one start of this machine from others; "" where nothing does."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""

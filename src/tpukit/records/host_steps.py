"""`hosts/<process>/steps.jsonl`: what each host did itself in every step.

All hosts of a synchronous step see the same step time, however slow one of them is. What tells them
apart is what each did before it could dispatch, so every process keeps a record of its own. Lines
are kept in memory and written once a second: a kill loses those of the last one.
"""

import json
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from pydantic_core import from_json

from ..runtime.run_files import HOST_STEPS_FILE, HOSTS_FOLDER
from ..runtime.run_tail import is_number, is_time
from .lines import AppendedLines, read_end

FLUSH_EVERY_S = 1.0
_TAIL, _LONGEST_TAIL = 16 << 10, 16 << 20


@dataclass(frozen=True, slots=True)
class HostStep:
    """One step as one host lived it.

    Attributes:
        time: Unix seconds when it was seen to complete.
        step: Counted from 1.
        step_time_s: From the completion of the step before it.
        input_s: Waiting for this host's rows of the batch.
        input_stall_s: The part of it during which the host's devices had nothing to do.
        checkpoint_s: In the call that saved a checkpoint before this step.
        dispatch_s: Handing rows and program to the devices.
        host: The machine's name.
    """

    time: float
    step: int
    step_time_s: float
    input_s: float = 0.0
    input_stall_s: float = 0.0
    checkpoint_s: float = 0.0
    dispatch_s: float = 0.0
    host: str = ""


NUMBERS = ("step_time_s", "input_s", "input_stall_s", "checkpoint_s", "dispatch_s")


class HostSteps:
    """Writes the steps of one process.

    Args:
        run_dir: The run's folder, which all processes reach or each has one of.
        process: Index of this process.
    """

    def __init__(self, run_dir: Path, process: int) -> None:
        self._lines = AppendedLines(steps_file(run_dir, process))
        self._host = json.dumps(socket.gethostname())
        self._waiting: list[str] = []
        self._written = 0.0

    def add(
        self,
        step: int,
        *,
        step_time_s: float,
        input_s: float,
        input_stall_s: float,
        checkpoint_s: float,
        dispatch_s: float,
    ) -> None:
        """Record a step that has completed now."""
        now = time.time()
        # By hand: this is in every step, and json.dumps takes three times as long.
        self._waiting.append(
            f'{{"time": {now:.6f}, "step": {step}, "step_time_s": {step_time_s:.6g}, '
            f'"input_s": {input_s:.6g}, "input_stall_s": {input_stall_s:.6g}, '
            f'"checkpoint_s": {checkpoint_s:.6g}, "dispatch_s": {dispatch_s:.6g}, '
            f'"host": {self._host}}}\n'
        )
        if not 0 <= now - self._written < FLUSH_EVERY_S:
            self._written = now
            self.flush()

    def flush(self) -> None:
        """Give what is waiting to the operating system."""
        if self._waiting:
            self._lines.write("".join(self._waiting))
            self._waiting.clear()

    def close(self) -> None:
        """Write the rest, and close the file."""
        self.flush()
        self._lines.close()


def steps_file(run_dir: Path, process: int) -> Path:
    """Return where a process writes its steps."""
    return run_dir / HOSTS_FOLDER / str(process) / HOST_STEPS_FILE


def read_newest_steps(run_dir: Path, process: int, *, since: float) -> list[HostStep]:
    """Return the steps that a process recorded after a time, as far as a few megabytes reach."""
    size, path = _TAIL, steps_file(run_dir, process)
    while True:
        lines, is_whole = read_end(path, size, inside=run_dir)
        steps = list(parse_steps(lines))
        if is_whole or size >= _LONGEST_TAIL or (steps and steps[0].time <= since):
            return [step for step in steps if step.time > since]
        size *= 4


def parse_steps(lines: list[bytes]) -> Iterator[HostStep]:
    """Yield the steps that lines hold; those that are cut short are passed over."""
    for line in lines:
        try:
            data: Any = from_json(line)
        except ValueError:
            continue
        if isinstance(data, dict):
            step = _step(cast("dict[str, Any]", data))
            if step is not None:
                yield step


def _step(data: dict[str, Any]) -> HostStep | None:
    values = [data.get("time"), data.get("step"), *(data.get(name, 0.0) for name in NUMBERS)]
    if not all(map(is_number, values)) or not is_time(values[0]):
        return None
    at, step, took, waited, stalled, saved, dispatched = cast("list[float]", values)
    host = str(data.get("host", ""))
    return HostStep(at, int(step), took, waited, stalled, saved, dispatched, host)

"""`hosts/<process>/steps.jsonl`: how long each host took itself in every step.

All hosts of a synchronous step see the same step time, however slow one of them is. They differ in
the time before their dispatch, so every process writes a record of its own. Lines are written once
per second, so a kill loses those of the last second.
"""

import json
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from ..plain_data import JsonObject
from .lines import AppendedLines, is_number, is_time, parse_lines, try_read_end
from .names import HOST_STEPS_FILE, HOSTS_FOLDER, INPUT_STALL, STEP_TIME

FLUSH_EVERY_S = 1.0
_TAIL, _LONGEST_TAIL = 16 << 10, 16 << 20


@dataclass(frozen=True, slots=True)
class HostStep:
    """One step of one host.

    Attributes:
        time: Unix seconds at which the host saw the step complete.
        step: Counted from 1.
        step_time_s: Seconds since the completion of the step before it.
        input_s: Seconds of waiting for this host's rows of the batch.
        input_stall_s: The part of `input_s` in which the host's devices were idle.
        checkpoint_s: Seconds in the call that saved a checkpoint before this step.
        dispatch_s: Seconds of handing rows and program to the devices.
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


NUMBERS = (STEP_TIME, "input_s", INPUT_STALL, "checkpoint_s", "dispatch_s")
# Formatted by hand: it is written in every step, and json.dumps takes three times as long.
_SECONDS = "".join(f'"{name}": %.6g, ' for name in NUMBERS)
_LINE = f'{{"time": %.6f, "step": %d, {_SECONDS}"host": %s}}\n'


class HostSteps:
    """Writes the steps of one process.

    Args:
        run_dir: The run's folder, shared by all processes or one per host.
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
        seconds = step_time_s, input_s, input_stall_s, checkpoint_s, dispatch_s
        self._waiting.append(_LINE % (now, step, *seconds, self._host))
        if not 0 <= now - self._written < FLUSH_EVERY_S:
            self._written = now
            self.flush()

    def flush(self) -> None:
        """Write the waiting lines."""
        if self._waiting:
            self._lines.write("".join(self._waiting))
            self._waiting.clear()

    def close(self) -> None:
        """Write the waiting lines, and close the file."""
        self.flush()
        self._lines.close()


def steps_file(run_dir: Path, process: int) -> Path:
    """Return the path of a process's step records."""
    return run_dir / HOSTS_FOLDER / str(process) / HOST_STEPS_FILE


def read_newest_steps(run_dir: Path, process: int, *, since: float) -> list[HostStep]:
    """Return the steps that a process recorded after a time, from the last 16 MiB at most."""
    size, path = _TAIL, steps_file(run_dir, process)
    while True:
        lines, is_all = try_read_end(path, size, inside=run_dir)
        steps = list(parse_steps(lines))
        if is_all or size >= _LONGEST_TAIL or (steps and steps[0].time <= since):
            return [step for step in steps if step.time > since]
        size *= 4


def parse_steps(lines: Sequence[bytes]) -> Iterator[HostStep]:
    """Yield the steps in some lines; a line that was cut short is skipped."""
    for record in parse_lines(lines):
        step = _step(record) if record else None
        if step is not None:
            yield step


def _step(data: JsonObject) -> HostStep | None:
    values = [data.get("time"), data.get("step"), *(data.get(name, 0.0) for name in NUMBERS)]
    if not all(map(is_number, values)) or not is_time(values[0]):
        return None
    at, step, took, waited, stalled, saved, dispatched = cast("list[float]", values)
    host = str(data.get("host", ""))
    return HostStep(at, int(step), took, waited, stalled, saved, dispatched, host)

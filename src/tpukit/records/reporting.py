"""Steps told to whoever supervises a run: one line each on standard output.

Lines pass through a pipe, ssh and the logs of Kubernetes alike. Nothing is written unless
TPUKIT_PROGRESS=lines is set, as a supervisor does.
"""

import json
import math
import os
import sys
from dataclasses import dataclass
from typing import Any, cast

MARK = "@tpukit "
VARIABLE = "TPUKIT_PROGRESS"
WANTED = "lines"


@dataclass(frozen=True)
class ProcessReport:
    """What a process told of itself.

    Attributes:
        step: The newest completed step, counted from 1.
        stopped: Why it ended before its last step, having saved: "preempted"; or "".
    """

    step: int
    loss: float | None = None
    stopped: str = ""


def report_step(step: int, loss: float | None = None) -> None:
    """Tell the supervisor that a step is completed; for programs other than `tpukit train`.

    Call it on every step of process 0: a job that reports no step in time counts as hung.
    """
    said: dict[str, Any] = {"step": int(step)}
    if loss is not None and math.isfinite(loss):
        said["loss"] = float(loss)
    _tell(said)


def report_stop(step: int, reason: str) -> None:
    """Tell the supervisor that the run ends early with `step` saved, and why."""
    _tell({"step": int(step), "stopped": reason})


def read_report(line: str) -> ProcessReport | None:
    """Return what a line of output reports; None for any other line."""
    if not line.startswith(MARK):
        return None
    try:
        said: Any = json.loads(line[len(MARK) :])
    except (ValueError, RecursionError):
        return None
    if not isinstance(said, dict):
        return None
    values = cast("dict[str, Any]", said)
    loss: Any = values.get("loss")
    step, stopped = values.get("step"), values.get("stopped", "")
    if type(step) is not int or step < 0 or not isinstance(stopped, str):
        return None
    if type(loss) not in (int, float) or not abs(loss) <= sys.float_info.max:
        loss = None
    return ProcessReport(step, None if loss is None else float(loss), stopped)


def _tell(said: dict[str, Any]) -> None:
    if os.environ.get(VARIABLE) != WANTED:
        return
    sys.stdout.flush()
    # In one write, which a pipe keeps whole: other threads print as well.
    os.write(1, f"{MARK}{json.dumps(said)}\n".encode())

"""Reports to a run's supervisor: one line per step on standard output.

Lines pass through pipes, ssh and Kubernetes logs. They are written only if the supervisor sets
TPUKIT_PROGRESS=lines.
"""

import json
import math
import os
import sys
from dataclasses import dataclass
from typing import Any, cast

from ..plain_data import JsonObject

MARK = "@tpukit "
VARIABLE = "TPUKIT_PROGRESS"
WANTED = "lines"


@dataclass(frozen=True)
class ProcessReport:
    """The report of a process.

    Attributes:
        step: The newest completed step, counted from 1.
        stopped: Why it saved and ended before its last step, such as "preempted"; or "".
    """

    step: int
    loss: float | None = None
    stopped: str = ""


def report_step(step: int, loss: float | None = None) -> None:
    """Report a completed step to the supervisor; for programs other than `tpukit train`.

    Call it on every step of process 0. A job that reports no step in time counts as hung.
    """
    report: JsonObject = {"step": int(step)}
    if loss is not None and math.isfinite(loss):
        report["loss"] = float(loss)
    _tell(report)


def report_stop(step: int, reason: str) -> None:
    """Report to the supervisor that the run ends early with `step` saved, and why."""
    _tell({"step": int(step), "stopped": reason})


def read_report(line: str) -> ProcessReport | None:
    """Return the report in a line of output; None for any other line."""
    if not line.startswith(MARK):
        return None
    try:
        report: Any = json.loads(line[len(MARK) :])
    except (ValueError, RecursionError):
        return None
    if not isinstance(report, dict):
        return None
    values = cast("JsonObject", report)
    loss: Any = values.get("loss")
    step, stopped = values.get("step"), values.get("stopped", "")
    if type(step) is not int or step < 0 or not isinstance(stopped, str):
        return None
    if type(loss) not in (int, float) or not abs(loss) <= sys.float_info.max:
        loss = None
    return ProcessReport(step, None if loss is None else float(loss), stopped)


def _tell(report: JsonObject) -> None:
    if os.environ.get(VARIABLE) != WANTED:
        return
    sys.stdout.flush()
    # In one write, so that a pipe does not mix it with other threads' output.
    os.write(1, f"{MARK}{json.dumps(report)}\n".encode())

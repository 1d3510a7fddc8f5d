"""Reports of work that takes longer than a step and is no hang, such as an evaluation or a save."""

import os
import sys

MARK = "@tpukit-busy "
# The variable with which supervisors ask for reports, as in tpukit.records.reporting.
_VARIABLE, _WANTED = "TPUKIT_PROGRESS", "lines"


def report_long_work(name: str) -> None:
    """Tell the run's supervisor that such work begins, or with "" that it has ended."""
    if os.environ.get(_VARIABLE) == _WANTED:
        sys.stdout.flush()
        os.write(1, f"{MARK}{name}\n".encode())


def read_long_work(line: str) -> str | None:
    """Return the work that a line of output reports, "" at its end; None for any other line."""
    return line[len(MARK) :].strip() if line.startswith(MARK) else None

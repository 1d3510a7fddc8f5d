"""The progress callback: called with one line per stage of the work.

Every slow function has a parameter `progress` of this type. `print` is a valid callback, and so is
the `append` of a list. Functions that people call from Python have `watched` as default.
"""

import sys
from collections.abc import Callable

Progress = Callable[[str], None]


def silent(line: str) -> None:
    """Ignore the line."""


def watched(line: str) -> None:
    """Print a line in a terminal or a notebook; elsewhere print nothing."""
    if "ipykernel.kernelapp" in sys.modules:  # notebooks colour standard error as a failure
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    elif sys.stderr.isatty():
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


class Counted(str):
    """A line that also states the progress, for a callback that draws a bar.

    Attributes:
        done: Amount done, in any unit.
        total: Total amount, in the same unit.
    """

    done: int
    total: int

    def __new__(cls, line: str, *, done: int, total: int) -> "Counted":
        """Make the line."""
        made = super().__new__(cls, line)
        made.done, made.total = done, total
        return made

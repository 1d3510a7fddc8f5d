"""How a caller hears what is being done: one callback, called with a line for each thing.

Every function that takes a while has a parameter `progress` of this type. `print` is one, and so is
the `append` of a list. Those that a person calls from Python have `watched` as their default.
"""

import sys
from collections.abc import Callable

Progress = Callable[[str], None]


def silent(line: str) -> None:
    """Tell nobody."""


def watched(line: str) -> None:
    """Show a line where a person watches, in a terminal or a notebook; elsewhere show nothing."""
    if "ipykernel.kernelapp" in sys.modules:  # notebooks colour standard error as a failure
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
    elif sys.stderr.isatty():
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()


class Counted(str):
    """A line that also says how far the work is, for a callback that draws a bar.

    Attributes:
        done: How much is done, in any unit.
        total: How much there is of it.
    """

    done: int
    total: int

    def __new__(cls, line: str, *, done: int, total: int) -> "Counted":
        """Make the line."""
        made = super().__new__(cls, line)
        made.done, made.total = done, total
        return made

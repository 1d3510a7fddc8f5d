"""A rehearsal as it goes: a spinner with the last line on a terminal, plain lines elsewhere."""

import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ..rehearsal.rehearse import Began
    from ..rehearsal.stage import Played


class RehearsalView(Protocol):
    """Shows stages as they are played."""

    def say(self, line: str) -> None:
        """Show what is being done."""
        ...

    def tell(self, event: "Began | Played") -> None:
        """Show that a stage begins, or what it found."""
        ...


class PlainRehearsalView:
    """One line for each thing on standard error, with the seconds since the start."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._stage = ""

    def say(self, line: str) -> None:
        """Write what is being done."""
        self._write(f"{self._stage:>8}  {line}")

    def tell(self, event: "Began | Played") -> None:
        """Write that a stage begins, or what it found."""
        self._stage = event.name
        self._write(line_of(event) or f"{event.name:>8}: {event.question}")

    def _write(self, text: str) -> None:
        sys.stderr.write(f"{time.perf_counter() - self._began:6.1f} s  {text}\n")
        sys.stderr.flush()


@contextmanager
def watching() -> Generator[RehearsalView]:
    """Show stages: above a spinner where standard error is a terminal, else as plain lines."""
    from rich.text import Text

    from ..terminal import open_console

    console = open_console(stderr=True)
    if not console.is_terminal:
        yield PlainRehearsalView()
        return
    with console.status("starting the emulated cloud") as status:

        class SpinningView:
            stage = ""

            def say(self, line: str) -> None:
                width = max(20, console.width - len(self.stage) - 8)
                status.update(Text.assemble((self.stage, "bold"), f"  {line}"[:width]))

            def tell(self, event: "Began | Played") -> None:
                if (line := line_of(event)) is not None:
                    console.print(Text(line))
                    return
                self.stage = event.name
                self.say(event.question)

        yield SpinningView()


def line_of(event: "Began | Played") -> str | None:
    """Return the line that shows a stage that is over; None for one that begins."""
    from ..rehearsal.result import MARKS
    from ..rehearsal.stage import Played

    if not isinstance(event, Played):
        return None
    return f"{MARKS[event.verdict]} {event.name:<8} {event.seconds:5.1f} s  {event.sentence}"

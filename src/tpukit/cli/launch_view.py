"""A run as it happens: lines with the host's name, and a bar of steps on a terminal."""

import re
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ..pods.launching.run_log import RunLogEntry

STEPS_EVERY_S = 5.0
"""Off a terminal, a step is shown this often."""
_OWN_STEP = re.compile(r"step \d+/\d+  loss ")


class LaunchView(Protocol):
    """Shows entries of a run's log."""

    def show(self, entry: "RunLogEntry") -> None:
        """Show one entry."""
        ...


class PlainLaunchView:
    """One line for each entry, for files and pipes.

    Steps are shown for jobs that print none themselves; `tpukit train` prints its own, with more
    figures.
    """

    def __init__(self, steps: int | None, *, to_stderr: bool) -> None:
        self._of = f"/{steps}" if steps else ""
        self._stream = sys.stderr if to_stderr else sys.stdout
        self._shown_at: float | None = None
        self._prints_steps = False

    def show(self, entry: "RunLogEntry") -> None:
        """Write the entry; of steps only some."""
        self._prints_steps = self._prints_steps or is_own_step(entry)
        if entry.kind == "step":
            if self._shown_at is None:
                self._shown_at = entry.at  # the job's own line on its first step may follow
            if self._prints_steps or entry.at - self._shown_at < STEPS_EVERY_S:
                return
            self._shown_at = entry.at
        text = line_of(entry, self._of)
        if text:
            self._stream.write(text + "\n")
            self._stream.flush()


@contextmanager
def watching(steps: int | None, *, to_stderr: bool = False) -> Generator[LaunchView]:
    """Show entries: above a bar where standard error is a terminal, else as plain lines."""
    from ..terminal import open_console, text_column

    console = open_console(stderr=True)
    if not console.is_terminal:
        yield PlainLaunchView(steps, to_stderr=to_stderr)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
    from rich.text import Text

    columns = (
        text_column("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        text_column("{task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("asking for a pod", total=steps, loss="")

        class BarView:
            figures = ""  # of the job's own lines on its steps

            def show(self, entry: "RunLogEntry") -> None:
                if is_own_step(entry):
                    self.figures = entry.text.partition("  ")[2]
                    return
                if entry.kind == "step":
                    loss = entry.data["loss"]
                    shown = self.figures or ("" if loss is None else f"loss {loss:.4f}")
                    bar.update(
                        task, completed=entry.data["step"], loss=shown, description="training"
                    )
                    return
                if entry.kind in ("pod", "attempt"):
                    bar.update(task, description=entry.text.split(":")[0])
                if text := line_of(entry, ""):
                    bar.console.print(Text(text))

        yield BarView()


def is_own_step(entry: "RunLogEntry") -> bool:
    """Whether a line is what `tpukit train` itself prints of its steps."""
    return entry.kind == "line" and _OWN_STEP.match(entry.text) is not None


def line_of(entry: "RunLogEntry", of: str) -> str:
    """Return the line that shows an entry; "" for the last one, which is shown as a result."""
    if entry.is_final:
        return ""
    if entry.kind == "step":
        loss = entry.data["loss"]
        return f"step {entry.data['step']}{of}" + ("" if loss is None else f"  loss {loss:.4f}")
    return f"[{entry.host}] {entry.text}" if entry.host else f"-- {entry.text}"

"""Output of commands: results as text or JSON, progress, and refusals of the compiler."""

import json as json_module
import sys
import threading
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import typer

from ..exit_codes import ExitCode
from ..plain_data import JsonMapping, JsonObject
from ..shown import Renderable, Shown


class Presentable(Protocol):
    """A result that can be shown as text and as JSON."""

    def __rich__(self) -> Renderable: ...

    def to_dict(self) -> JsonMapping:
        """Return the result as JSON data."""
        ...


def show(result: Presentable, *, json: bool = False) -> None:
    """Print a result, as JSON if `json` is set."""
    Announcer.hush()
    if json:
        sys.stdout.write(json_module.dumps(result.to_dict(), indent=2, ensure_ascii=False) + "\n")
        return
    print_whole(result)


def print_whole(renderable: Any) -> None:
    """Print to standard output, folded to a terminal's width but never on a pipe."""
    from ..terminal import open_console, width_for

    console = open_console()
    console.width = width_for(console, renderable)
    console.print(renderable, crop=False)  # what cannot be folded is left to the terminal


@dataclass(frozen=True)
class Written(Shown):
    """Files that a command wrote, as its only result."""

    files: tuple[Path, ...]
    advice: str = ""

    def to_dict(self) -> JsonObject:
        """Return plain data."""
        return {"wrote": [str(file) for file in self.files]}

    def __rich__(self) -> Renderable:
        from rich.text import Text

        names = ", ".join(map(str, self.files))
        return Text(f"wrote {names}{self.advice}", no_wrap=True, overflow="ignore")


@contextmanager
def working(what: str) -> Generator[None]:
    """Show that something slow is running: a spinner on a terminal, otherwise a line."""
    from rich.text import Text

    from ..terminal import open_console

    console = open_console(stderr=True)
    if console.is_terminal:
        with console.status(Text(what)):
            yield
    else:
        sys.stderr.write(f"{what} ...\n")
        sys.stderr.flush()
        yield


@contextmanager
def refusals_as_exit_codes() -> Generator[None]:
    """Print a refusal of the compiler that comes before any report, and exit as `check` does.

    Other errors are passed on to `main.run`.
    """
    from ..errors import TPUNotAvailableError, TPUOutOfMemoryError, XLACompilationError

    try:
        yield
    except TPUOutOfMemoryError as error:
        typer.secho(f"DOES NOT FIT {error}", fg=typer.colors.RED)
        raise typer.Exit(ExitCode.DOES_NOT_FIT) from None
    except (XLACompilationError, TPUNotAvailableError) as error:
        typer.secho(f"could not tell: {error}", fg=typer.colors.YELLOW, err=True)
        raise typer.Exit(ExitCode.COULD_NOT_TELL) from None


class Announcer:
    """Prints the current action to standard error, with the seconds since the start.

    An action that takes longer than `SILENCE_S` is printed again, until there is a result (`show`)
    or the command ends (`cli.app`).
    """

    SILENCE_S = 15.0
    _speaking: ClassVar["list[Announcer]"] = []

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self._last: str | None = None
        self._spoke = threading.Event()
        self._ended = False

    def __call__(self, what: str) -> None:
        """Print one line."""
        if self._last is None:
            self._speaking.append(self)
            threading.Thread(target=self._repeat, name="announcer", daemon=True).start()
        self._last = what
        self._spoke.set()
        self._write(what)

    @classmethod
    def hush(cls) -> None:
        """Stop printing, because the result is there."""
        while cls._speaking:
            one = cls._speaking.pop()
            one._ended = True
            one._spoke.set()

    def _repeat(self) -> None:
        while not self._ended:
            spoke = self._spoke.wait(self.SILENCE_S)
            self._spoke.clear()
            if not spoke and not self._ended:
                self._write(f"… still: {self._last}")

    def _write(self, what: str) -> None:
        sys.stderr.write(f"{time.perf_counter() - self.started:6.1f} s  {what}\n")
        sys.stderr.flush()

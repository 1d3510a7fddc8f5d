"""What commands say: results as text or JSON from one object, progress, the compiler's refusals."""

import json as json_module
import sys
import threading
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import typer

from ..shown import Shown


class Presentable(Protocol):
    """A result that can show itself to a person and to a machine."""

    def __rich__(self) -> Any: ...

    def to_dict(self) -> Mapping[str, Any]:
        """The result as JSON data."""
        ...


def show(result: Presentable, *, json: bool = False) -> None:
    """Write `result` to standard output, as JSON when `json` is set."""
    Announcer.hush()
    if json:
        sys.stdout.write(json_module.dumps(result.to_dict(), indent=2, ensure_ascii=False) + "\n")
        return
    print_whole(result)


def print_whole(renderable: Any) -> None:
    """Write to standard output: folded to a terminal's width, never folded or cut on a pipe."""
    from ..terminal import open_console, width_for

    console = open_console()
    console.width = width_for(console, renderable)
    console.print(renderable, crop=False)  # what cannot be folded is left to the terminal


@dataclass(frozen=True)
class Written(Shown):
    """Files that a command wrote, where that is all there is to say."""

    files: tuple[Path, ...]
    advice: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {"wrote": [str(file) for file in self.files]}

    def __rich__(self) -> Any:
        from rich.text import Text

        names = ", ".join(map(str, self.files))
        return Text(f"wrote {names}{self.advice}", no_wrap=True, overflow="ignore")


@contextmanager
def working(what: str) -> Generator[None]:
    """Say on standard error that something slow is under way: a spinner, or a plain line."""
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
    """Say what the compiler refused before there was anything to report, and exit as `check` does.

    Other errors are the user's, and pass through to `main.run`.
    """
    from ..checker.result import COULD_NOT_TELL, DOES_NOT_FIT
    from ..errors import TPUNotAvailableError, TPUOutOfMemoryError, XLACompilationError

    try:
        yield
    except TPUOutOfMemoryError as error:
        typer.secho(f"DOES NOT FIT {error}", fg=typer.colors.RED)
        raise typer.Exit(DOES_NOT_FIT) from None
    except (XLACompilationError, TPUNotAvailableError) as error:
        typer.secho(f"could not tell: {error}", fg=typer.colors.YELLOW, err=True)
        raise typer.Exit(COULD_NOT_TELL) from None


class Announcer:
    """Says on standard error what is being done, with the seconds since the start.

    Nobody waits without a word: what takes longer than `SILENCE_S` is named again, until there
    is an answer (`show`) or the command ends (`cli.app`).
    """

    SILENCE_S = 15.0
    _speaking: ClassVar["list[Announcer]"] = []

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self._last: str | None = None
        self._spoke = threading.Event()
        self._ended = False

    def __call__(self, what: str) -> None:
        """Write one line."""
        if self._last is None:
            self._speaking.append(self)
            threading.Thread(target=self._repeat, name="announcer", daemon=True).start()
        self._last = what
        self._spoke.set()
        self._write(what)

    @classmethod
    def hush(cls) -> None:
        """Say nothing again: the answer is there."""
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

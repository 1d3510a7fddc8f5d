"""What commands say: results as text or JSON from one object, progress, the compiler's refusals."""

import json as json_module
import sys
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import typer


class Presentable(Protocol):
    """A result that can show itself to a person and to a machine."""

    def __rich__(self) -> Any: ...

    def to_dict(self) -> Mapping[str, Any]:
        """The result as JSON data."""
        ...


def show(result: Presentable, *, json: bool = False) -> None:
    """Write `result` to standard output, as JSON when `json` is set."""
    if json:
        sys.stdout.write(json_module.dumps(result.to_dict(), indent=2, ensure_ascii=False) + "\n")
        return
    from rich.console import Console

    Console().print(result)


@contextmanager
def working(what: str) -> Generator[None]:
    """Say on standard error that something slow is under way: a spinner, or a plain line."""
    from rich.console import Console

    console = Console(stderr=True)
    if console.is_terminal:
        with console.status(what):
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
    """Says on standard error what is being done, with the seconds since the start."""

    def __init__(self) -> None:
        self.started = time.perf_counter()

    def __call__(self, what: str) -> None:
        """Write one line."""
        sys.stderr.write(f"{time.perf_counter() - self.started:6.1f} s  {what}\n")
        sys.stderr.flush()

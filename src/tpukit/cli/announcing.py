"""What commands that compile say while they do, and how they exit where the compiler refuses."""

import sys
import time
from collections.abc import Generator
from contextlib import contextmanager

import typer


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

"""The `tpukit` command: its start, Ctrl-C, and how errors are shown."""

import os
import sys

from ..errors import TPUError, in_few_words
from ..exit_codes import ExitCode
from ..runtime.interruption import end_on_ctrl_c, exit_code, was_interrupted


def run() -> None:
    """Run the command; an error of the user is one line on standard error, not a traceback."""
    end_on_ctrl_c()  # first of all: importing what commands are made of takes a while
    from .app import app

    try:
        app()
    except SystemExit:
        if was_interrupted():
            sys.exit(exit_code())
        raise
    except BrokenPipeError:  # `tpukit slices | head` is not an error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(ExitCode.DONE)
    except Exception as error:  # noqa: BLE001 - whatever it is, it ends as one line
        sys.exit(tell(error))


def tell(error: Exception) -> int:
    """Print an error as one line, and return its exit code.

    With `--debug` or TPUKIT_TRACEBACK, the traceback is printed instead.
    """
    import traceback

    import typer

    shown = bool(os.environ.get("TPUKIT_TRACEBACK"))
    match error:
        case TPUError():
            message, code = in_few_words(error), ExitCode.BAD_INPUT
        # A full disk, a permission or a path is no bug, wherever it occurs.
        case OSError(filename=str(), strerror=str()):
            message, code = f"{error.filename}: {error.strerror}.", ExitCode.BAD_INPUT
        case _:
            message, code = "" if shown else _unexpected(error), ExitCode.FAILED
    if shown:
        traceback.print_exception(error)
        return code
    typer.secho(f"error: {message}", fg=typer.colors.RED, err=True)
    return code


def _unexpected(error: Exception) -> str:
    """Return the message of an unexpected error, whose traceback is written to a file."""
    import traceback
    from datetime import UTC, datetime

    from ..runtime.files import cache_folder, private_folder, write_text

    what = f"unexpected {type(error).__name__}: {' '.join(str(error).split())}".removesuffix(": ")
    path = cache_folder("errors") / f"{datetime.now(UTC):%Y%m%dT%H%M%S}-{os.getpid()}.txt"
    try:
        private_folder(path.parent)
        said = "".join([_typed(sys.argv), "\n", *traceback.format_exception(error)])
        # Arguments may contain invalid text.
        write_text(path, said.encode(errors="backslashreplace").decode(), private=True)
    except OSError:
        return f"{what} (tpukit --debug … shows where)."
    return f"{what} (the details are in {path}; tpukit --debug … shows them here)."


def _typed(words: list[str]) -> str:
    """Return the typed command without the values of tokens."""
    kept: list[str] = []
    for word in words:
        name, equals, _ = word.partition("=")
        hidden = kept[-1:] == ["--token"]
        kept.append("…" if hidden else f"{name}=…" if equals and name == "--token" else word)
    return " ".join(kept)

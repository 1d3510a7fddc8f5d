"""Errors of the user's own code, with the responsible line of the user's file."""

import os
import sysconfig
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from ..errors import TPUError, TPUModelError

_OWN = Path(__file__).parents[1]
_STANDARD = Path(sysconfig.get_path("stdlib"))
_INSTALLED = ("site-packages", "dist-packages")
# Packages whose lines help no user, even where an error came through installed code alone.
_LIBRARIES = (
    *("torch", "torchax", "jax", "jaxlib", "flax", "equinox", "haiku", "optax", "chex"),
    *("jaxtyping", "beartype", "opt_einsum", "numpy", "wadler_lindig"),
)


def user_line(error: BaseException) -> str:
    """Return "file:line: code" of the innermost line of the user's code; "" where there is none.

    A line of an installed package, such as transformers, is returned only if the error came
    through no file of the user's own.
    """
    frames = traceback.extract_tb(error.__traceback__)[::-1]
    found = [(_package(frame.filename), frame) for frame in frames]
    own = [frame for package, frame in found if package == ""]
    others = [frame for package, frame in found if package]
    for frame in (*own, *others):
        return f"{_shown(frame.filename)}:{frame.lineno}: {frame.line}"
    return ""


@contextmanager
def errors_in_trace(name: str) -> Generator[None]:
    """Turn exceptions of traced user code into an error that names the line.

    Errors without a line of the user's code are raised unchanged.

    Args:
        name: The model or function that is traced.

    Raises:
        TPUModelError: The user's code raised an exception.
    """
    from jax.errors import JaxRuntimeError

    try:
        yield
    # A program that fails while it runs was traced, and debugging mode raises for NaN.
    except (TPUError, JaxRuntimeError, FloatingPointError):
        raise
    except Exception as error:
        where = user_line(error)
        if not where:
            raise
        raise TPUModelError(
            f"{name} cannot be traced: {type(error).__name__}: {first_line(error)} ({where})."
        ) from error


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, without a full stop."""
    return str(error).strip().split("\n")[0].rstrip(".")


def _package(filename: str) -> str | None:
    """Return "" for a user's file, the name of an installed package, or None for other files."""
    path = Path(filename)
    if filename.startswith("<") or path.is_relative_to(_OWN):
        return None
    for parent in path.parents:
        if parent.name in _INSTALLED:
            package = path.relative_to(parent).parts[0]
            return None if package in _LIBRARIES else package
    return None if path.is_relative_to(_STANDARD) else ""


def _shown(filename: str) -> str:
    """Return a path relative to the current folder if it is below it."""
    path = Path(filename)
    return str(path.relative_to(here)) if path.is_relative_to(here := os.getcwd()) else filename

"""What stops a module from becoming one program, said with the line of the user's own code."""

import sysconfig
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax

from ....errors import TPUError, TPUModelError

_OWN = Path(__file__).parents[3]
_STANDARD = Path(sysconfig.get_path("stdlib"))
# Frames inside these packages are not where a person would look.
_LIBRARIES = ("torch", "torchax", "jax", "jaxlib", "flax", "optax", "opt_einsum", "numpy")


@contextmanager
def explained(module: Any) -> Generator[None]:
    """Turn what jax and torchax say into what the user can change.

    Raises:
        TPUModelError: The module branches on values, has shapes that depend on them, uses an
            operation that has no lowering or no gradient, mixes in a tensor that is not part of
            it, or fails while it is traced.
    """
    name = type(module).__name__
    try:
        yield
    except (TPUError, jax.errors.JaxRuntimeError):  # a program that fails while it runs was traced
        raise
    except Exception as error:  # anyone's module may raise anything while it is traced
        said = _said(error) or f"cannot be traced: {type(error).__name__}: {_first_line(error)}"
        raise TPUModelError(f"{name} {said}{_where(error)}.") from error


def _said(error: Exception) -> str | None:
    text = str(error)
    if isinstance(error, jax.errors.NonConcreteBooleanIndexError):
        return (
            "selects by a boolean mask, so a shape depends on values, and a TPU program has fixed "
            "shapes: use torch.where, or a fixed number of indices"
        )
    if isinstance(
        error, jax.errors.ConcretizationTypeError | jax.errors.TracerArrayConversionError
    ):
        return (
            "branches on the value of a tensor, which is not known when the program is compiled: "
            "use torch.where, or decide by shapes or settings"
        )
    if type(error).__name__ == "OperatorNotFound":
        operation = text.removeprefix("Operator with name ").removesuffix(" has no lowering")
        return f"uses {operation}, which has no lowering to jax; replace it by others"
    if isinstance(error, AssertionError) and "mixed math" in text:
        return (
            "mixes a tensor that is neither its input nor its own state into its result: register "
            "it with register_buffer, or pass it in"
        )
    return None


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0].rstrip(".")


def _where(error: BaseException) -> str:
    """Return the innermost line of the user's own code, "" where there is none."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_users(frame.filename):
            return f" ({Path(frame.filename).name}:{frame.lineno}: {frame.line})"
    return ""


def _is_users(filename: str) -> bool:
    path = Path(filename)
    if filename.startswith("<") or path.is_relative_to(_OWN):
        return False
    for parent in path.parents:
        if parent.name == "site-packages":
            return path.relative_to(parent).parts[0] not in _LIBRARIES
    return not path.is_relative_to(_STANDARD)

"""What stops a module from becoming one program, said with the line of the user's own code."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import jax

from ....errors import TPUError, TPUModelError
from ....runtime.user_code import first_line, user_line


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
        said = _said(error) or f"cannot be traced: {type(error).__name__}: {first_line(error)}"
        where = f" ({line})" if (line := user_line(error)) else ""
        raise TPUModelError(f"{name} {said}{where}.") from error


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

"""What a measured program is called with, read from its row."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ....errors import TPUKernelError
from .rows import MeasuredRow


@dataclass(frozen=True)
class MeasuredProgram:
    """A function, what it is called with, and the kind of kernel whose rates time it.

    Attributes:
        arguments: Shapes, or arrays where the values decide what a kernel does.
        kind: None for what XLA alone makes.
    """

    function: Callable[..., Any]
    arguments: Sequence[Any]
    kind: str | None = None


def shape_of(row: MeasuredRow, argument: str) -> jax.ShapeDtypeStruct:
    """Shape and dtype of one argument of a row.

    Raises:
        TPUKernelError: The row does not say it, or says it in words jax does not know.
    """
    for table, what in ((row.shapes, "shape"), (row.dtypes, "dtype")):
        if argument not in table:
            raise TPUKernelError(f"the row does not say the {what} of {argument!r}")
    try:
        dtype = jnp.dtype(row.dtypes[argument])
    except (TypeError, ValueError, SyntaxError) as error:
        raise TPUKernelError(
            f"{row.dtypes[argument]!r}, the dtype of {argument!r}, is none that jax has"
        ) from error
    return jax.ShapeDtypeStruct(row.shapes[argument], dtype)


def group_sizes_of(row: MeasuredRow, shape: jax.ShapeDtypeStruct) -> np.ndarray:
    """The group sizes of a row, which decide how often the loop of a grouped kernel runs.

    Raises:
        TPUKernelError: The row does not say them, or not for every group.
    """
    if row.group_sizes is None:
        raise TPUKernelError("the row does not say the sizes of its groups")
    if shape.shape != (len(row.group_sizes.values),):
        raise TPUKernelError(
            f"the row has {len(row.group_sizes.values)} group sizes for group_sizes of shape "
            f"{list(shape.shape)}"
        )
    if max(row.group_sizes.values, default=0) > np.iinfo(np.int32).max:
        raise TPUKernelError("a group of the row is larger than an int32 says")
    return np.asarray(row.group_sizes.values, np.int32)

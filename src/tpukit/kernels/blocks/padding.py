"""Calling a kernel that wants whole tiles with arrays that are none."""

from collections.abc import Callable
from typing import Any

import jax

from ...errors import TPUKernelError
from .tiling import pad_to_tiles


def call_padded(
    reference: Callable[..., Any], function: Callable[..., Any], *arrays: Any, **options: Any
) -> Any:
    """`function` of the arrays padded with zeros to whole tiles, its results cut back.

    Args:
        reference: Takes the arrays as they are: its result has the shapes to cut back to. It is
            traced and not run.
        function: Takes the padded arrays.
        *arrays: Arrays, or trees of them.
        **options: Static arguments of both; `blocks` of the function alone.

    Raises:
        TPUKernelError: A result is smaller than the reference's.
    """
    plain = {name: value for name, value in options.items() if name != "blocks"}
    wanted = jax.eval_shape(lambda *given: reference(*given, **plain), *arrays)
    padded = jax.tree.map(lambda array: pad_to_tiles(array)[0], arrays)
    return jax.tree.map(_cut, function(*padded, **options), wanted)


def _cut(result: jax.Array, wanted: jax.ShapeDtypeStruct) -> jax.Array:
    if result.ndim != len(wanted.shape) or any(
        have < want for have, want in zip(result.shape, wanted.shape, strict=True)
    ):
        raise TPUKernelError(
            f"On padded arrays the kernel gives {result.shape}, which does not hold the "
            f"{wanted.shape} of the function itself; pad_to_tiles= suits kernels whose results "
            "grow with their arguments."
        )
    return result[tuple(slice(size) for size in wanted.shape)]

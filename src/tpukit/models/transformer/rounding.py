"""Weights rounded to the dtype of activations when their layer runs, and their gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def round_in_use(stacked: Any, dtype: jnp.dtype) -> tuple[Callable[[Any], Any], Any]:
    """A stack for `run_layers` whose matrices are rounded to `dtype` layer by layer.

    A weight that is stored in float32 and used in bfloat16 has a gradient of bfloat16 values. Left
    to itself a loop over layers stacks them in float32, and XLA rounds the weights of all layers
    before the loop starts: for every weight four bytes on the chip that hold nothing.

    Args:
        stacked: Parameters with a leading layer axis; the layers use their matrices in `dtype` and
            nothing else, a router's excepted.
        dtype: The dtype of activations.

    Returns:
        What makes a layer's parameters of those cut out of the stack, and the stack.
    """
    named, structure = jax.tree_util.tree_flatten_with_path(stacked)
    masters = [leaf for _, leaf in named]
    rounds = [
        _is_matrix(path) and leaf.dtype.itemsize > jnp.dtype(dtype).itemsize for path, leaf in named
    ]
    # Only the gradients of these are wanted; their values are never read, so nobody computes them.
    narrow = [leaf.astype(dtype) if r else None for leaf, r in zip(masters, rounds, strict=True)]
    wide = [
        jax.lax.stop_gradient(leaf) if r else leaf for leaf, r in zip(masters, rounds, strict=True)
    ]

    def rounded(parameters: Any) -> Any:
        used: list[Any] = [
            leaf if other is None else _rounded(leaf, other)
            for leaf, other in zip(*parameters, strict=True)
        ]
        return jax.tree.unflatten(structure, used)

    return rounded, (wide, narrow)


def _is_matrix(path: tuple[Any, ...]) -> bool:
    names = {str(getattr(entry, "key", entry)) for entry in path}
    return "experts" in names or ("kernel" in names and "router" not in names)


@jax.custom_jvp
def _rounded(wide: jax.Array, narrow: jax.Array) -> jax.Array:
    """The value of `wide` in the dtype of `narrow`; gradients go to `narrow`."""
    # What is only ever rounded, XLA rounds where it is stored: in the whole stack. What is compared
    # it leaves as it is. The other branch is for NaN alone, which it keeps.
    return jnp.where(wide == wide, wide, wide + wide).astype(narrow.dtype)


@_rounded.defjvp
def _rounded_jvp(
    primals: tuple[jax.Array, jax.Array], tangents: tuple[Any, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    rounded: Any = _rounded(*primals)
    return rounded, tangents[1]

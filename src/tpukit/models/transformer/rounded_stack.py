"""Weights of stacked layers, rounded one layer at a time; their gradients are stacked as narrow.

A weight that is stored in float32 and used in bfloat16 has a gradient of bfloat16 values. Left to
itself a loop over layers stacks them in float32, and XLA rounds the weights of all layers before
the loop starts: for every weight four bytes on the chip that hold nothing.
"""

from typing import Any

import jax
import jax.numpy as jnp

from .layer_stack import LayerFunction


def round_in_use(
    layer: LayerFunction, stacked: Any, dtype: jnp.dtype
) -> tuple[LayerFunction, tuple[Any, Any]]:
    """A layer and a stack for `run_layers`: a layer's matrices are rounded to `dtype` as it runs.

    Args:
        layer: Uses the matrices of its parameters in `dtype` and nothing else, a router's excepted.
        stacked: Parameters with a leading layer axis.
        dtype: The dtype of activations.
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

    def one_layer(parameters: Any, x: jax.Array, index: int) -> tuple[jax.Array, Any]:
        used: list[Any] = [
            leaf if other is None else _rounded(leaf, other)
            for leaf, other in zip(*parameters, strict=True)
        ]
        return layer(jax.tree.unflatten(structure, used), x, index)

    return one_layer, (wide, narrow)


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

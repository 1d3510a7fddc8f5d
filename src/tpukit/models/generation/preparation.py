"""Weights as a GPU decodes with them: each layer's apart, and those of one product side by side.

A step that reads one token a row does little but read weights. Cut out of a stack, or put side by
side, they would be written and read once more. So they are laid out once, before anything runs;
the program takes them apart again, and the compiler sees that this is where they came from.
"""

from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp

from ...annotations import PyTree

# Matrices that read the same activations, under the name of what holds them.
_TOGETHER = {
    "self_attention": ("q_proj", "k_proj", "v_proj"),
    "mlp": ("gate_proj", "up_proj"),
    "shared": ("gate_proj", "up_proj"),
    "dense": ("gate_proj", "up_proj"),
}
_JOINED = "joined"
_LAYERS = "layers"


def lay_apart(params: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters with a tuple of layers for every stack, each with its products joined."""
    return {**params, _LAYERS: jax.tree.map(_unstacked, _joined(params[_LAYERS], ""))}


def put_together(prepared: Mapping[str, Any]) -> PyTree:
    """The parameters that `lay_apart` was given; inside a program, at no cost."""
    # Parted before they are stacked: the compiler joins slices of one matrix, not of a stack.
    parted = _parted(prepared[_LAYERS])
    whole = jax.tree.map(_stacked, parted, is_leaf=lambda one: isinstance(one, tuple))
    return {**prepared, _LAYERS: whole}


def _stacked(layers: tuple[jax.Array, ...]) -> jax.Array:
    return jnp.stack(layers)


def _unstacked(leaf: jax.Array) -> tuple[jax.Array, ...]:
    return tuple(leaf[number] for number in range(leaf.shape[0]))


def _joined(tree: Any, name: str) -> Any:
    if not isinstance(tree, Mapping):
        return tree
    branch = cast("Mapping[str, Any]", tree)
    made = {key: _joined(value, key) for key, value in branch.items()}
    names = _TOGETHER.get(name, ())
    if not names or not all(_is_matrix(made.get(one)) for one in names):
        return made
    kernels: list[jax.Array] = [made[one].pop("kernel") for one in names]
    widths = "_".join(str(kernel.shape[-1]) for kernel in kernels)
    return {**made, f"{_JOINED}_{widths}": jnp.concatenate(kernels, axis=-1)}


def _is_matrix(part: Any) -> bool:
    return isinstance(part, Mapping) and "kernel" in part


def _parted(tree: Any) -> Any:
    if not isinstance(tree, Mapping):
        return tree
    branch = cast("Mapping[str, Any]", tree)
    made: dict[str, Any] = {}
    for key, value in branch.items():
        inner = _parted(value)
        if not key.startswith(_JOINED):
            made[key] = {**made.get(key, {}), **inner} if isinstance(inner, dict) else inner
            continue
        widths = [int(width) for width in key.split("_")[1:]]
        names = ("q_proj", "k_proj", "v_proj") if len(widths) == 3 else ("gate_proj", "up_proj")
        start = 0
        for name, width in zip(names, widths, strict=True):
            parts = tuple(one[:, start : start + width] for one in inner)
            made[name] = {**made.get(name, {}), "kernel": parts}
            start += width
    return made

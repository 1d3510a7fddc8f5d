"""Run a stack of equal layers: scanned or unrolled, in remat segments, with a repeating pattern."""

import math
from collections.abc import Callable
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp

from ..remat.policy import RematPolicy

# (parameters of one layer, activations, its number in the period) -> (activations, statistics)
LayerFunction = Callable[[Any, jax.Array, int], tuple[jax.Array, Any]]


def run_layers(
    layer: LayerFunction,
    stacked: Any,
    x: jax.Array,
    *,
    period: int = 1,
    remat: RematPolicy,
    scan: bool = True,
) -> tuple[jax.Array, Any]:
    """Send `x` through every layer of `stacked`, whose leaves have a leading layer axis.

    One scan step runs as many layers as it takes for both the pattern (`period`) and the remat
    segments to come out even; what is left over at the end is unrolled.

    Returns:
        The activations, and the layers' statistics added up.
    """
    n_layers = jax.tree.leaves(stacked)[0].shape[0]
    group = math.lcm(period, remat.every_n_layers)
    groups = n_layers // group if scan else 0
    totals: list[Any] = []
    if groups:
        scanned = jax.tree.map(
            lambda leaf: leaf[: groups * group].reshape(groups, group, *leaf.shape[1:]), stacked
        )

        def body(carry: jax.Array, parameters: Any) -> tuple[jax.Array, Any]:
            return _run_unrolled(layer, parameters, carry, period=period, remat=remat, in_loop=True)

        x, per_group = jax.lax.scan(body, x, scanned)
        totals.append(jax.tree.map(lambda leaf: jnp.sum(leaf, axis=0), per_group))
    if n_layers > groups * group:
        rest = jax.tree.map(lambda leaf: leaf[groups * group :], stacked)
        x, total = _run_unrolled(layer, rest, x, period=period, remat=remat, in_loop=False)
        totals.append(total)
    return x, _add(totals)


def _run_unrolled(
    layer: LayerFunction,
    stacked: Any,
    x: jax.Array,
    *,
    period: int,
    remat: RematPolicy,
    in_loop: bool,
) -> tuple[jax.Array, Any]:
    n_layers = jax.tree.leaves(stacked)[0].shape[0]
    totals: list[Any] = []
    if not remat.active and n_layers > 1:
        leaves, structure = jax.tree.flatten(stacked)
        for number, cuts in enumerate(zip(*map(_unstack, leaves), strict=True)):
            x, seen = layer(jax.tree.unflatten(structure, cuts), x, number % period)
            totals.append(seen)
        return x, _add(totals)
    for start in range(0, n_layers, remat.every_n_layers):
        numbers = range(start, min(start + remat.every_n_layers, n_layers))

        # Layers are cut out of the stack inside the segment: cut outside, each cut would be an
        # input of the segment, and the backward pass would keep a second copy of the weights.
        def segment(stacked: Any, x: jax.Array, numbers: range = numbers) -> Any:
            statistics: list[Any] = []
            for number in numbers:
                one = jax.tree.map(lambda leaf, number=number: leaf[number], stacked)
                x, seen = layer(one, x, number % period)
                statistics.append(seen)
            return x, _add(statistics)

        x, seen = remat.wrap(segment, in_loop=in_loop)(stacked, x)
        totals.append(seen)
    return x, _add(totals)


@jax.custom_vjp
def _unstack(leaf: jax.Array) -> tuple[jax.Array, ...]:
    """The layers of a stack, whose gradients are put side by side.

    The gradient of slicing would add up as many whole stacks as there are layers.
    """
    return tuple(leaf[number] for number in range(leaf.shape[0]))


def _unstack_forward(leaf: jax.Array) -> tuple[tuple[jax.Array, ...], None]:
    return _unstack(leaf), None


def _unstack_backward(_: None, gradients: tuple[jax.Array, ...]) -> tuple[jax.Array]:
    return (jnp.stack(gradients),)


_unstack.defvjp(_unstack_forward, _unstack_backward)


def _add(statistics: list[Any]) -> Any:
    return reduce(lambda a, b: jax.tree.map(jnp.add, a, b), statistics)


def round_in_use(
    layer: LayerFunction, stacked: Any, dtype: jnp.dtype
) -> tuple[LayerFunction, tuple[Any, Any]]:
    """A layer and a stack for `run_layers`: a layer's matrices are rounded to `dtype` as it runs.

    A weight that is stored in float32 and used in bfloat16 has a gradient of bfloat16 values. Left
    to itself a loop over layers stacks them in float32, and XLA rounds the weights of all layers
    before the loop starts: for every weight four bytes on the chip that hold nothing.

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

"""Run programs on stored parameters, whose matmuls read the quantized form."""

import math
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp

from ...annotations import PyTree
from ...hardware.target import current_target
from ...kernels.ops.quantized_matmul.weight import quantize_rows
from ...kernels.rounding import decode
from .parameter import StoredParameter, is_stored
from .parts import PartStack, part_matmul
from .placement import with_known_shardings
from .view import StoredMatmul, View
from .walk import StoredLeaf, Tracked, WeightMatmul, plain, tracked_parameter, walk

Activations: TypeAlias = Literal["wide", "int8"]


def with_stored_parameters(
    function: Callable[..., Any],
    activations: Activations = "wide",
    *,
    trained: bool = False,
    shardings: Callable[[], PyTree] | None = None,
) -> Callable[..., Any]:
    """Return the function with support for stored parameters in its first argument.

    The function is traced on arrays of the parameters' shapes. A matmul with a stored parameter
    uses the fused TPU kernel, or decodes the matrix for that matmul on other devices. Other
    operations decode the parameter first. Without stored parameters the function is called as is.

    Args:
        function: Anything that jax can trace.
        activations: "wide" keeps the inputs of matmuls with stored parameters; "int8" rounds them
            to int8, each row by its largest magnitude.
        trained: Whether the function is differentiated. Every matrix is then decoded for its
            matmul and again for the gradient, so that no decoded matrix is kept between.
        shardings: Returns the shardings of the parameters as plain arrays. Inside a scan over
            layers kernels do not see shardings, and the compiler would decode instead.
    """

    def run(params: PyTree, *args: Any) -> PyTree:
        if not any(map(is_stored, jax.tree.leaves(params, is_leaf=is_stored))):
            return function(params, *args)
        if shardings is not None:
            params = with_known_shardings(params, shardings())
        flat, tree = jax.tree.flatten(params, is_leaf=is_stored)
        shapes = [_shape(leaf) for leaf in flat]
        closed, out = jax.make_jaxpr(function, return_shape=True)(tree.unflatten(shapes), *args)
        given = [*map(_tracked, range(len(flat)), flat, shapes), *jax.tree.leaves(args)]
        values = walk(closed.jaxpr, closed.consts, given, _Running(activations, trained))
        return jax.tree.unflatten(jax.tree.structure(out), [plain(value) for value in values])

    return run


def dense_shapes(params: PyTree) -> PyTree:
    """Return the shape and dtype of every parameter, stored ones as plain arrays."""
    return jax.tree.map(_shape, params, is_leaf=is_stored)


def dense_parameters(params: PyTree) -> PyTree:
    """Return the tree with every stored parameter as an array."""
    return jax.tree.map(
        lambda leaf: leaf.dense() if is_stored(leaf) else leaf, params, is_leaf=is_stored
    )


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(leaf.dtype))


def _tracked(number: int, leaf: Any, shape: jax.ShapeDtypeStruct) -> Any:
    if not is_stored(leaf):
        return leaf
    return tracked_parameter(StoredLeaf(number, leaf), View.whole(shape.shape), shape.dtype)


class _Running:
    """A visitor that multiplies by stored parameters."""

    records = False

    def __init__(self, activations: Activations, trained: bool) -> None:
        self._activations, self._trained = activations, trained

    def matmul(self, found: WeightMatmul, multiply: Callable[[Any, Any], Any]) -> Any:
        """See `Visitor`."""
        x, weight = found.x, found.weight
        if weight.leaf.stored is None:
            return multiply(x, weight.get())
        if self._activations == "int8":
            x = _rounded(x, found.x_contraction.contracted)
        if self._trained:
            # Inside a scan CSE cannot merge this with the forward pass.
            again = jax.checkpoint(lambda x: multiply(x, weight.get()), prevent_cse=False)
            return again(x)
        part = _whole_part(weight, found)
        if part is None or not _has_kernels():
            return multiply(x, weight.get())
        return _by_kernel(x, part, found)

    def enter_loop(self) -> None:
        """See `Visitor`."""

    def leave_loop(self, entered: None) -> tuple[()]:
        """See `Visitor`: nothing is recorded."""
        return ()

    def after_loop(self, recorded: tuple[()]) -> None:
        """See `Visitor`."""


def _has_kernels() -> bool:
    return current_target() is not None or jax.default_backend() == "tpu"


def _rounded(x: jax.Array, contracted: tuple[int, ...]) -> jax.Array:
    """Return x rounded to int8 values, in its own dtype, with a scale per row."""
    kept = [axis for axis in range(x.ndim) if axis not in contracted]
    order = (*kept, *contracted)
    turned = jnp.transpose(x, order)
    rows = turned.reshape(-1, math.prod(turned.shape[len(kept) :]))
    values, scales = quantize_rows(rows)
    back = decode(values, scales, x.dtype).reshape(turned.shape)
    return jnp.transpose(back, [order.index(axis) for axis in range(x.ndim)])


def _whole_part(weight: Tracked, found: WeightMatmul) -> Any:
    """Return the single quantized part of a matmul, possibly inside a stack, or None."""
    stored = weight.leaf.stored
    assert stored is not None
    reach = stored.reach(weight.view)
    if reach is None or len(reach.numbers) != 1 or found.contraction.batch:
        return None
    piece = stored.piece(reach, stored.reached(reach))
    axes = StoredMatmul(0, reach.view, found.contraction).matrix_axes(piece.shape)
    own = piece.axes
    same = axes is not None and (axes.inputs, axes.outputs) == (own.inputs, own.outputs)
    free = [a for a in range(len(weight.view.shape)) if a not in found.contraction.contracted]
    in_order = sorted(free, key=lambda axis: -weight.view.strides[axis]) == free
    if not same or not in_order:
        return None
    parts = piece.parts
    kept, part = (parts.part, parts) if isinstance(parts, PartStack) else (parts[0], parts[0])
    return None if isinstance(kept, jax.Array) else part


def _by_kernel(x: jax.Array, part: Any, found: WeightMatmul) -> jax.Array:
    view, summed = found.weight.view, found.contraction.contracted
    order = sorted(range(len(summed)), key=lambda i: -view.strides[summed[i]])
    inner = [found.x_contraction.contracted[i] for i in order]
    kept = [axis for axis in range(x.ndim) if axis not in inner]
    rows = jnp.transpose(x, (*kept, *inner)).reshape(*(x.shape[a] for a in kept), -1)
    free = [size for axis, size in enumerate(view.shape) if axis not in summed]
    out = part_matmul(rows, part).reshape(*rows.shape[:-1], *free)
    if not found.weight_first:
        return out
    return jnp.moveaxis(out, range(len(kept)), range(-len(kept), 0))


__all__ = [
    "Activations",
    "StoredParameter",
    "dense_parameters",
    "dense_shapes",
    "with_stored_parameters",
]

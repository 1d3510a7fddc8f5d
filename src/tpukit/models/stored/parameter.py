"""`StoredParameter`: a parameter kept as quantized matrices, used as a leaf of a parameter tree."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ...annotations import PyTree
from ...kernels.ops.quantized_matmul.weight import array_bytes
from .parts import Parts, PartStack, part_matrix, stacked
from .view import MatrixAxes, View, row_major


class Reach(NamedTuple):
    """The matrices of a stored parameter that a view covers.

    Attributes:
        numbers: The numbers of the parts, in order.
        shape: The axes before the matrix.
        view: The same elements as a view of a parameter with only these parts.
    """

    numbers: tuple[int, ...]
    shape: tuple[int, ...]
    view: View

    @property
    def in_a_row(self) -> bool:
        """Whether the parts are consecutive."""
        return self.numbers == tuple(range(self.numbers[0], self.numbers[0] + len(self.numbers)))


@partial(jax.tree_util.register_dataclass, data_fields=("parts",), meta_fields=("axes", "dtype"))
@dataclass(frozen=True)
class StoredParameter:
    """A parameter as matrices, some or all of them quantized.

    The arrays of a part are sharded like its matrix; see `VQArray`.

    Attributes:
        parts: (inputs, outputs) matrices, one per index of the stack, separate or stacked.
        axes: The axes of the parameter.
        dtype: The name of the dtype that the model expects.
    """

    parts: Parts
    axes: MatrixAxes
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter."""
        return self.axes.shape

    @property
    def ndim(self) -> int:
        """The number of dimensions of the parameter."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts in memory."""
        return array_bytes(self.parts)

    def dense(self, view: View | None = None) -> jax.Array:
        """Return the parameter, or the elements of a view of `reach`, as an array."""
        axes = self.axes
        sizes = [axes.shape[axis] for axis in axes.order]
        array = self._matrices().reshape(sizes).transpose(np.argsort(axes.order))
        if view is None or view == View.whole(self.shape):
            return array
        order = _by_stride(view)
        turned = array.reshape([view.shape[axis] for axis in order])
        return turned.transpose(np.argsort(order))

    def _matrices(self) -> jax.Array:
        if isinstance(self.parts, tuple):
            return jnp.stack([part_matrix(part, self.dtype) for part in self.parts])
        return self.parts.matrices(self.dtype)

    def reach(self, view: View) -> Reach | None:
        """Return the parts that a view covers, or None where it has incomplete matrices."""
        axes = self.axes
        if axes.stack != tuple(range(len(axes.stack))):
            return None
        unit, outer = axes.rows * axes.columns, 0
        for size, stride in zip(view.shape, view.strides, strict=True):
            if size != 1 and stride < unit:
                break
            outer += 1
        inside = View(view.shape[outer:], view.strides[outer:], view.offset % unit)
        order = _by_stride(inside)
        ordered = [inside.shape[axis] for axis in order if inside.shape[axis] != 1]
        strides = [inside.strides[axis] for axis in order if inside.shape[axis] != 1]
        if inside.offset or strides != list(row_major(ordered)) or np.prod(ordered) != unit:
            return None
        steps = [stride // unit for stride in view.strides[:outer]]
        numbers = np.full((), view.offset // unit)
        for size, step in zip(view.shape[:outer], steps, strict=True):
            numbers = numbers[..., None] + np.arange(size) * step
        shape = view.shape[:outer]
        moved = (*(unit * stride for stride in row_major(shape)), *inside.strides)
        return Reach(tuple(numbers.ravel().tolist()), shape, View(view.shape, moved))

    def run_of(self, reach: Reach) -> tuple[PartStack, int] | None:
        """Return the stack with consecutive parts and the first part's index in it, or None."""
        if isinstance(self.parts, tuple) or not reach.in_a_row:
            return None
        return self.parts.holding(reach.numbers[0], len(reach.numbers))

    def reached(self, reach: Reach) -> "tuple[Any, ...] | PartStack":
        """Return the parts of a reach, as a stack where consecutive parts are stacked."""
        if (found := self.run_of(reach)) is not None:
            stack, first = found
            return stack.some(first, len(reach.numbers))
        return tuple(self.parts[number] for number in reach.numbers)

    def piece(self, reach: Reach, parts: Parts) -> "StoredParameter":
        """Return a parameter of the parts of a reach, or of other parts in their place."""
        old = len(self.axes.stack)
        new = len(reach.shape)
        axes = MatrixAxes(
            (*reach.shape, *self.axes.shape[old:]),
            tuple(range(new)),
            tuple(axis - old + new for axis in self.axes.inputs),
            tuple(axis - old + new for axis in self.axes.outputs),
        )
        return StoredParameter(parts, axes, self.dtype)


def is_stored(leaf: object) -> bool:
    """Whether a leaf of a tree of parameters is a stored one."""
    return isinstance(leaf, StoredParameter)


def with_stacks(params: PyTree) -> PyTree:
    """Return the tree with equal parts of every stored parameter stacked."""

    def one(leaf: Any) -> Any:
        return replace(leaf, parts=stacked(leaf.parts)) if is_stored(leaf) else leaf

    return jax.tree.map(one, params, is_leaf=is_stored)


def store(array: jax.Array, parts: tuple[Any, ...], axes: MatrixAxes) -> StoredParameter:
    """Return the parameter `array` with its matrices replaced by `parts`."""
    assert len(parts) == axes.count
    return StoredParameter(parts, axes, jnp.dtype(array.dtype).name)


def matrices_of(array: Any, axes: MatrixAxes) -> jax.Array:
    """Return the matrices (count, inputs, outputs) of a parameter."""
    return jnp.transpose(jnp.asarray(array), axes.order).reshape(
        axes.count, axes.rows, axes.columns
    )


def _by_stride(view: View) -> list[int]:
    return sorted(
        range(len(view.shape)), key=lambda axis: (-view.strides[axis], view.shape[axis] != 1)
    )

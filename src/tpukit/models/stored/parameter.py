"""`StoredParameter`: a model's parameter kept as quantized matrices, a leaf's place in its tree."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from ...kernels.ops.quantized_matmul.api import quantized_matmul
from ...kernels.ops.quantized_matmul.packing import dequantize
from ...kernels.ops.quantized_matmul.weight import QuantizedWeight
from .product import MatrixAxes
from .view import View, row_major


class QuantizedMatrix(Protocol):
    """A matrix (inputs, outputs) in a format of its own, a tree of arrays."""

    @property
    def shape(self) -> tuple[int, int]:
        """(inputs, outputs)."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        ...

    def dequantize(self, dtype: DTypeLike = ...) -> jax.Array:
        """The matrix it stands for."""
        ...

    def shardings(self, sharding: NamedSharding) -> Any:
        """The same of shardings, from that of the matrix; a stack's has its leading axis first."""
        ...

    def __rmatmul__(self, x: Any) -> jax.Array:
        """(…, inputs) -> (…, outputs)."""
        ...


# A matrix that is not quantized is an array.
Part: TypeAlias = QuantizedMatrix | QuantizedWeight | jax.Array


def part_matrix(part: Part, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """The (inputs, outputs) array a part stands for."""
    if isinstance(part, QuantizedWeight):
        return dequantize(part, dtype)
    return part.astype(dtype) if isinstance(part, jax.Array) else part.dequantize(dtype)


def part_product(x: jax.Array, part: "Part | PartStack") -> jax.Array:
    """`x @ part` for x (…, inputs), by the kernel of its format where there is one.

    Of a stack of one matrix, the kernel reads it where it lies.
    """
    if isinstance(part, PartStack):
        if isinstance(part.part, QuantizedWeight):
            return quantized_matmul(x, part.placed(), index=jnp.asarray(part.start))
        return x @ part[0]
    return quantized_matmul(x, part) if isinstance(part, QuantizedWeight) else x @ part


def part_bytes(part: Part) -> int:
    """Bytes of a part's arrays."""
    leaves: list[Any] = jax.tree.leaves(part)
    return sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in leaves)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("part",),
    meta_fields=("count", "start", "shardings"),
)
@dataclass(frozen=True)
class PartStack:
    """Neighbouring matrices of one format, kept as one part whose arrays have an axis of matrices.

    A loop over layers takes one after the other out of it, and copies none.

    Attributes:
        part: All matrices there are, some of which are meant.
        count: How many are.
        start: The number of the first that is meant: 0 but inside a loop, where it is traced.
        shardings: Of the part's arrays, where they are known: a loop hides them from kernels.
    """

    part: Any
    count: int
    start: Any = 0
    shardings: Any = None

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, range(self.count))

    def __getitem__(self, number: int) -> Any:
        """One matrix as a part of its own."""
        at = self.start + number

        def taken(part: Any) -> Any:
            return jax.tree.map(
                lambda leaf: jax.lax.dynamic_index_in_dim(leaf, at, keepdims=False), part
            )

        leaves: list[Any] = jax.tree.leaves(self.part)
        if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves):  # a stack to be checked
            return jax.eval_shape(taken, self.part)
        return taken(self.part)

    def some(self, first: Any, count: int) -> "PartStack":
        """Neighbouring ones of these."""
        return replace(self, count=count, start=self.start + first)

    def placed(self) -> Any:
        """The whole part, and where it lies if that is known."""
        if self.shardings is None:
            return self.part
        return jax.lax.with_sharding_constraint(self.part, self.shardings)

    def matrices(self, dtype: DTypeLike) -> jax.Array:
        """(count, inputs, outputs) what they stand for."""
        meant = jax.tree.map(
            lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, self.start, self.count), self.part
        )
        return jax.vmap(lambda part: part_matrix(part, dtype))(meant)


def with_stacks(params: Any) -> Any:
    """The tree, with the parts of every stored parameter in one stack where they are alike."""

    def one(leaf: Any) -> Any:
        return replace(leaf, parts=stacked(leaf.parts)) if is_stored(leaf) else leaf

    return jax.tree.map(one, params, is_leaf=is_stored)


def stacked(parts: "tuple[Part, ...] | PartStack") -> "tuple[Part, ...] | PartStack":
    """The parts as a stack, or as they are where there is one alone or they differ."""
    if isinstance(parts, PartStack) or len({jax.tree.structure(part) for part in parts}) > 1:
        return parts
    shapes = {tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(part)) for part in parts}
    if len(parts) == 1 or len(shapes) > 1:
        return parts
    return PartStack(jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts), len(parts))


class Reach(NamedTuple):
    """The matrices of a stored parameter that a view is made of.

    Attributes:
        numbers: Of the parts, in order.
        shape: The axes before the matrix.
        view: The same elements in a parameter that holds those parts and no others.
    """

    numbers: tuple[int, ...]
    shape: tuple[int, ...]
    view: View

    @property
    def in_a_row(self) -> bool:
        """Whether the parts are neighbours."""
        return self.numbers == tuple(range(self.numbers[0], self.numbers[0] + len(self.numbers)))


@partial(jax.tree_util.register_dataclass, data_fields=("parts",), meta_fields=("axes", "dtype"))
@dataclass(frozen=True)
class StoredParameter:
    """A parameter as matrices, some or all of them quantized.

    The arrays of a part shard as its matrix does: see `VQArray`.

    Attributes:
        parts: (inputs, outputs) matrices, one for each index of the stack: each by itself, or a
            `PartStack`.
        axes: What the axes of the parameter are.
        dtype: The name of the dtype the model expects it in.
    """

    parts: "tuple[Any, ...] | PartStack"
    axes: MatrixAxes
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the parameter."""
        return self.axes.shape

    @property
    def ndim(self) -> int:
        """Of the parameter."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of all parts as they lie in memory."""
        if isinstance(self.parts, PartStack):
            return part_bytes(self.parts.part)
        return sum(map(part_bytes, self.parts))

    def dense(self, view: View | None = None) -> jax.Array:
        """The parameter, or the elements of a view `reach` gave, as an array."""
        axes = self.axes
        sizes = [axes.shape[axis] for axis in axes.order]
        array = self._matrices().reshape(sizes).transpose(np.argsort(axes.order))
        if view is None or view == View.whole(self.shape):
            return array
        order = _by_stride(view)
        turned = array.reshape([view.shape[axis] for axis in order])
        return turned.transpose(np.argsort(order))

    def _matrices(self) -> jax.Array:
        if isinstance(self.parts, PartStack):
            return self.parts.matrices(self.dtype)
        return jnp.stack([part_matrix(part, self.dtype) for part in self.parts])

    def reach(self, view: View) -> Reach | None:
        """Which parts a view is made of; None where it is not of whole matrices."""
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

    def reached(self, reach: Reach) -> "tuple[Any, ...] | PartStack":
        """The parts that a view reaches; those of a stack as a stack where they are neighbours."""
        if isinstance(self.parts, PartStack) and reach.in_a_row:
            return self.parts.some(reach.numbers[0], len(reach.numbers))
        return tuple(self.parts[number] for number in reach.numbers)

    def piece(self, reach: Reach, parts: "tuple[Any, ...] | PartStack") -> "StoredParameter":
        """A parameter of the parts that a view reaches, or of others in their place."""
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


def store(array: jax.Array, parts: tuple[Any, ...], axes: MatrixAxes) -> StoredParameter:
    """The parameter `array` with its matrices replaced by `parts`."""
    assert len(parts) == axes.count
    return StoredParameter(parts, axes, jnp.dtype(array.dtype).name)


def matrices_of(array: Any, axes: MatrixAxes) -> jax.Array:
    """The matrices of a parameter, (count, inputs, outputs)."""
    return jnp.transpose(jnp.asarray(array), axes.order).reshape(
        axes.count, axes.rows, axes.columns
    )


def _by_stride(view: View) -> list[int]:
    return sorted(
        range(len(view.shape)), key=lambda axis: (-view.strides[axis], view.shape[axis] != 1)
    )

"""The matrices of a stored parameter: single ones, or stacks that a loop over layers reads."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain, groupby
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from ...kernels.ops.quantized_matmul.api import quantized_matmul
from ...kernels.ops.quantized_matmul.weight import QuantizedWeight, dequantize


class QuantizedMatrix(Protocol):
    """A matrix (inputs, outputs) in a quantized format, as a tree of arrays."""

    @property
    def shape(self) -> tuple[int, int]:
        """(inputs, outputs)."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of its arrays."""
        ...

    def dequantize(self, dtype: DTypeLike = ...) -> jax.Array:
        """Return the dequantized matrix."""
        ...

    def shardings(self, sharding: NamedSharding) -> Any:
        """Return a tree of shardings for the sharding of the matrix, or of a stack of matrices."""
        ...

    def __rmatmul__(self, x: Any) -> jax.Array:
        """Return x @ self, (…, inputs) -> (…, outputs)."""
        ...


# A matrix that is not quantized is an array.
Part: TypeAlias = QuantizedMatrix | QuantizedWeight | jax.Array


def part_matrix(part: Part, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Return the dequantized (inputs, outputs) array of a part."""
    if isinstance(part, QuantizedWeight):
        return dequantize(part, dtype)
    return part.astype(dtype) if isinstance(part, jax.Array) else part.dequantize(dtype)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("part",),
    meta_fields=("count", "start", "shardings"),
)
@dataclass(frozen=True)
class PartStack:
    """Consecutive matrices of one format, as one part whose arrays have a leading axis.

    A scan over layers reads one matrix after the other without copying it.

    Attributes:
        part: The stacked matrices, of which this object may select a range.
        count: The number of selected matrices.
        start: The number of the first selected matrix; a traced value inside a scan.
        shardings: The shardings of the part's arrays, if known. A scan hides them from kernels.
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
        """Return one matrix as a part."""
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
        """Return a range of these matrices."""
        return replace(self, count=count, start=self.start + first)

    def placed(self) -> Any:
        """Return the part with a sharding constraint, if its shardings are known."""
        if self.shardings is None:
            return self.part
        return jax.lax.with_sharding_constraint(self.part, self.shardings)

    def matrices(self, dtype: DTypeLike) -> jax.Array:
        """Return the dequantized matrices (count, inputs, outputs)."""
        meant = jax.tree.map(
            lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, self.start, self.count), self.part
        )
        return jax.vmap(lambda part: part_matrix(part, dtype))(meant)

    def holding(self, first: int, count: int) -> "tuple[PartStack, int]":
        """Return the stack with these consecutive matrices, and the index of the first in it."""
        return self, first


@partial(jax.tree_util.register_dataclass, data_fields=("runs",), meta_fields=())
@dataclass(frozen=True)
class PartRuns:
    """Matrices of different formats: a stack for each run of equal consecutive formats."""

    runs: tuple[PartStack, ...]

    def __len__(self) -> int:
        return sum(map(len, self.runs))

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self.runs)

    def __getitem__(self, number: int) -> Any:
        """Return one matrix as a part."""
        found = self.holding(number, 1)
        assert found is not None
        run, at = found
        return run[at]

    def holding(self, first: int, count: int) -> tuple[PartStack, int] | None:
        """Return the stack with these consecutive matrices, and the index of the first in it."""
        ends = accumulate(map(len, self.runs))
        run, end = next((run, end) for run, end in zip(self.runs, ends, strict=True) if first < end)
        return (run, first - (end - len(run))) if first + count <= end else None

    def matrices(self, dtype: DTypeLike) -> jax.Array:
        """Return the dequantized matrices (count, inputs, outputs)."""
        return jnp.concatenate([run.matrices(dtype) for run in self.runs])


Parts: TypeAlias = tuple[Any, ...] | PartStack | PartRuns


def part_matmul(x: jax.Array, part: "Part | PartStack") -> jax.Array:
    """Return `x @ part` for x (…, inputs), by the kernel of the part's format if there is one.

    For a stack with one selected matrix the kernel reads the matrix inside the stack.
    """
    if isinstance(part, PartStack):
        if isinstance(part.part, QuantizedWeight):
            return quantized_matmul(x, part.placed(), index=jnp.asarray(part.start))
        return x @ part[0]
    return quantized_matmul(x, part) if isinstance(part, QuantizedWeight) else x @ part


def stacked(parts: Parts) -> Parts:
    """Return the parts as one stack, or as one stack per run of equal formats."""
    if not isinstance(parts, tuple) or len(parts) == 1:
        return parts
    runs = tuple(_stack(list(alike)) for _, alike in groupby(parts, key=_kind))
    return runs[0] if len(runs) == 1 else PartRuns(runs)


def _stack(parts: list[Part]) -> PartStack:
    return PartStack(jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts), len(parts))


def _kind(part: Part) -> Any:
    leaves, tree = jax.tree.flatten(part)
    return tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves)

"""Matrices of a stored parameter side by side, as a loop over layers reads them."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain, groupby
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ...kernels.ops.quantized_matmul.api import quantized_matmul
from ...kernels.ops.quantized_matmul.weight import QuantizedWeight
from .part import Part, part_matrix


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

    def holding(self, first: int, count: int) -> "tuple[PartStack, int]":
        """The stack that holds so many in a row, and which of its matrices is the first."""
        return self, first


@partial(jax.tree_util.register_dataclass, data_fields=("runs",), meta_fields=())
@dataclass(frozen=True)
class PartRuns:
    """Matrices whose formats differ: a stack for each run of neighbours that are alike."""

    runs: tuple[PartStack, ...]

    def __len__(self) -> int:
        return sum(map(len, self.runs))

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(self.runs)

    def __getitem__(self, number: int) -> Any:
        """One matrix as a part of its own."""
        found = self.holding(number, 1)
        assert found is not None
        run, at = found
        return run[at]

    def holding(self, first: int, count: int) -> tuple[PartStack, int] | None:
        """The stack that holds so many in a row, and which of its matrices is the first."""
        ends = accumulate(map(len, self.runs))
        run, end = next((run, end) for run, end in zip(self.runs, ends, strict=True) if first < end)
        return (run, first - (end - len(run))) if first + count <= end else None

    def matrices(self, dtype: DTypeLike) -> jax.Array:
        """(count, inputs, outputs) what they stand for."""
        return jnp.concatenate([run.matrices(dtype) for run in self.runs])


Parts: TypeAlias = tuple[Any, ...] | PartStack | PartRuns


def part_product(x: jax.Array, part: "Part | PartStack") -> jax.Array:
    """`x @ part` for x (…, inputs), by the kernel of its format where there is one.

    Of a stack of one matrix, the kernel reads it where it lies.
    """
    if isinstance(part, PartStack):
        if isinstance(part.part, QuantizedWeight):
            return quantized_matmul(x, part.placed(), index=jnp.asarray(part.start))
        return x @ part[0]
    return quantized_matmul(x, part) if isinstance(part, QuantizedWeight) else x @ part


def stacked(parts: Parts) -> Parts:
    """The parts in one stack, or one for each run of those that are alike; one alone as it is."""
    if not isinstance(parts, tuple) or len(parts) == 1:
        return parts
    runs = tuple(_stack(list(alike)) for _, alike in groupby(parts, key=_kind))
    return runs[0] if len(runs) == 1 else PartRuns(runs)


def _stack(parts: list[Part]) -> PartStack:
    return PartStack(jax.tree.map(lambda *leaves: jnp.stack(leaves), *parts), len(parts))


def _kind(part: Part) -> Any:
    leaves, tree = jax.tree.flatten(part)
    return tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves)

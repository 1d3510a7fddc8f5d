"""Names of array dimensions: which may be sharded over a mesh, and how one call is sharded.

Dimensions of one name are sharded over the same mesh axes in all arrays. A result without the name
of a sharded dimension is a sum over that dimension, so the shares of the devices are added up.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ...errors import TPUKernelError

Names: TypeAlias = tuple[str, ...]  # of an array's dimensions
NameTree: TypeAlias = (
    "str | tuple[NameTree, ...]"  # names in one string, in a tree like that of the arrays
)
Axes: TypeAlias = tuple[str, ...]  # mesh axes
Spec: TypeAlias = tuple[Axes, ...]  # for each dimension its mesh axes
Assignment: TypeAlias = Mapping[str, Axes]  # for each name its mesh axes
LEADING = "..."
UNNAMED = "_"


@dataclass(frozen=True)
class Splits:
    """The names of the dimensions of an op's arrays, and which of them may be sharded.

    The names of an array are one string, such as "b s h d"; a tree of arrays has a tuple of
    strings. "..." stands for any number of leading dimensions. An array with fewer dimensions than
    names takes the last names.

    Attributes:
        free: Names of the dimensions that may be sharded; arrays are gathered along all others.
        arguments: Names for the op's arguments.
        result: Names for the result.
        residuals: Names for the residuals of the forward pass.
        shared: Names of dimensions that may be shorter in one array than in another (heads of keys
            and of queries). Where there are more devices than elements, the elements are repeated.
        takes_axes: Whether kernels get `axes=`, the mesh axes by name, and combine the shards
            themselves, because a result is not the sum of the devices' results.
    """

    free: str = ""
    arguments: NameTree = ()
    result: NameTree = ()
    residuals: NameTree = ()
    shared: str = ""
    takes_axes: bool = False

    @property
    def alone(self) -> "Pass":
        """Names for the pass from the arguments to the result."""
        return Pass(self, self.arguments, self.result)

    @property
    def forward(self) -> "Pass":
        """Names for the pass from the arguments to the result and the residuals."""
        return Pass(self, self.arguments, (self.result, self.residuals))

    @property
    def backward(self) -> "Pass":
        """Names for the pass from residuals and cotangent to the arguments' gradients."""
        return Pass(self, (self.residuals, self.result), self.arguments)


@dataclass(frozen=True)
class Pass:
    """The names of the inputs and outputs of one pass of an op."""

    splits: Splits
    inputs: NameTree
    outputs: NameTree

    def of(self, arrays: Any, results: Any) -> "CallNames":
        """Return the names for flat arrays and results of these ranks."""
        inputs = tuple(_names(self.inputs, arrays))
        outputs = tuple(_names(self.outputs, results))
        wanted = set(self.splits.free.split())
        every = {name for names in (*inputs, *outputs) for name in names}
        free = {name for name in every if name in wanted or _stem(name) in wanted}
        shared = frozenset(self.splits.shared.split())
        return CallNames(inputs, outputs, frozenset(free), shared, self.splits.takes_axes)


@dataclass(frozen=True)
class CallNames:
    """The names of one call's flat arrays, and which of them may be sharded."""

    inputs: tuple[Names, ...]
    outputs: tuple[Names, ...]
    free: frozenset[str]
    shared: frozenset[str]
    takes_axes: bool

    def only(self, outputs: Sequence[int]) -> "CallNames":
        """Return the same call with only these outputs."""
        return replace(self, outputs=tuple(self.outputs[at] for at in outputs))

    def batched(self, inputs: Sequence[bool]) -> "CallNames":
        """Return the call under `vmap`, with a leading dimension in batched inputs and outputs."""
        name = f"batch{sum(name.startswith('batch') for name in self.free)}"
        return replace(
            self,
            inputs=tuple(
                (name, *names) if is_batched else names
                for names, is_batched in zip(self.inputs, inputs, strict=True)
            ),
            outputs=tuple((name, *names) for names in self.outputs),
            free=self.free | {name},
        )

    def assign(
        self,
        specs: Sequence[Spec],
        shapes: Sequence[Sequence[int]],
        sizes: Mapping[str, int],
    ) -> dict[str, Axes]:
        """Return the mesh axes for each name, given the shardings of the inputs.

        Earlier inputs decide. An axis shards one name, and only if all shards are equally large.

        Args:
            specs: Shardings of the inputs.
            shapes: Shapes of the inputs.
            sizes: Sizes of the mesh axes.
        """
        assignment: dict[str, Axes] = {}
        taken: set[str] = set()
        for names, spec in zip(self.inputs, specs, strict=True):
            for name, axes in zip(names, spec, strict=True):
                if name in assignment or name not in self.free:
                    continue
                ours = tuple(takewhile(lambda axis: axis not in taken, axes))
                while ours and not self._divides(ways_of(ours, sizes), name, shapes):
                    ours = ours[:-1]
                if ours:
                    assignment[name] = ours
                    taken.update(ours)
        return assignment

    def _divides(self, ways: int, name: str, shapes: Sequence[Sequence[int]]) -> bool:
        sizes = [
            size
            for names, shape in zip(self.inputs, shapes, strict=True)
            for own, size in zip(names, shape, strict=True)
            if own == name
        ]
        if name in self.shared and max(sizes) % ways == 0:
            return all(size % ways == 0 or ways % size == 0 for size in sizes)
        return all(size % ways == 0 for size in sizes)


def partition_spec(names: Names, assignment: Assignment) -> PartitionSpec:
    """Return the sharding of an array with these names."""
    return PartitionSpec(*(assignment.get(name) for name in names))


def summed_axes(names: Names, assignment: Assignment) -> Axes:
    """Return the mesh axes over which an output with these names must be summed."""
    return tuple(axis for name, axes in assignment.items() if name not in names for axis in axes)


def add_up(x: jax.Array, axes: Axes) -> jax.Array:
    """Sum `x` over mesh axes, of which there may be none."""
    return jax.lax.psum(x, axes) if axes else x


def repeat_shared(x: jax.Array, names: Names, ways: Mapping[str, int]) -> jax.Array:
    """Repeat the elements of `x` along dimensions that are too short for their number of shards."""
    for at, name in enumerate(names):
        if x.shape[at] % ways.get(name, 1):
            x = jnp.repeat(x, ways[name] // x.shape[at], axis=at)
    return x


def add_up_shared(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Return the gradient of `repeat_shared`: repeated elements are summed back to `shape`."""
    for at, size in enumerate(shape):
        if x.shape[at] != size:
            apart = x.reshape(*x.shape[:at], size, -1, *x.shape[at + 1 :])
            x = apart.sum(at + 1, dtype=x.dtype)
    return x


def ways_of(axes: Axes, sizes: Mapping[str, int]) -> int:
    """Return the number of shards that these axes divide a dimension into."""
    return math.prod(sizes[axis] for axis in axes)


def _names(texts: Any, arrays: Any) -> Iterator[Names]:
    """Yield the names of each array in a tree, given a tree of strings of the same structure."""
    if arrays is None:
        return
    if isinstance(texts, str):
        for leaf in jax.tree.leaves(arrays):
            yield _expand(texts, leaf.shape)
        return
    if isinstance(arrays, list | tuple) and len(texts) >= len(arrays):
        for text, array in zip(texts, arrays, strict=False):
            yield from _names(text, array)
        return
    if not texts:  # without names nothing is sharded
        for leaf in jax.tree.leaves(arrays):
            yield _expand("", leaf.shape)
        return
    raise TPUKernelError(
        f"The dimension names {texts!r} do not have the tree structure of the "
        f"{len(jax.tree.leaves(arrays))} arrays; give one string per array."
    )


def _expand(text: str, shape: Sequence[int]) -> Names:
    names, rank = text.split(), len(shape)
    if names[:1] == [LEADING]:
        leading = rank - len(names) + 1
        names = [f"{LEADING}{number}" for number in range(leading)] + names[1:]
    missing = rank - len(names)
    if missing > 0 and text:
        raise TPUKernelError(
            f"The dimensions of an array are named {text!r}, but it has {rank}; name all of them."
        )
    names = [UNNAMED] * missing + names[max(0, -missing) :]
    # A single element is not sharded: a mask for all heads, a head of keys for all queries.
    return tuple(UNNAMED if size == 1 else name for name, size in zip(names, shape, strict=True))


def _stem(name: str) -> str:
    return LEADING if name.startswith(LEADING) else name

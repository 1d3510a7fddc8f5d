"""Which dimensions of an op's arrays may be split over a mesh, and how one call is split.

Dimensions have names. Those of one name are split alike, in whichever arrays they are. A result
without the name of a dimension that is split was summed over it: its pieces are added up.
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
NameTree: TypeAlias = "str | tuple[NameTree, ...]"  # names as one text, in a tree of arrays' shape
Axes: TypeAlias = tuple[str, ...]  # of a mesh
Spec: TypeAlias = tuple[Axes, ...]  # for each dimension the axes that split it
Assignment: TypeAlias = Mapping[str, Axes]  # for each name the axes that split such dimensions
LEADING = "..."
UNNAMED = "_"


@dataclass(frozen=True)
class Splits:
    """The names of the dimensions of an op's arrays, and which of them may be split.

    Each array's names are one text, such as "b s h d"; where an argument is a tree of arrays, a
    tuple of texts. "..." stands for any number of leading dimensions, and an array that has fewer
    dimensions than names has the last ones.

    Attributes:
        free: Names of the dimensions that may be split; along all others arrays are gathered.
        arguments: Of the arrays the op takes.
        result: Of what it returns.
        residuals: Of what its forward pass keeps for its backward pass.
        shared: Those names of which an array with fewer elements shares each among several of
            another array's (heads of keys); on more devices than there are, they are repeated.
        told_axes: Whether kernels are given `axes=`, the mesh axes by name, and combine pieces
            themselves: for results that are not the sum of what each device has.
    """

    free: str = ""
    arguments: NameTree = ()
    result: NameTree = ()
    residuals: NameTree = ()
    shared: str = ""
    told_axes: bool = False

    @property
    def alone(self) -> "Pass":
        """The pass from the arguments to the result."""
        return Pass(self, self.arguments, self.result)

    @property
    def forward(self) -> "Pass":
        """The pass from the arguments to the result and the residuals."""
        return Pass(self, self.arguments, (self.result, self.residuals))

    @property
    def backward(self) -> "Pass":
        """The pass from the residuals and the result's cotangent to the arguments' gradients."""
        return Pass(self, (self.residuals, self.result), self.arguments)


@dataclass(frozen=True)
class Pass:
    """The names of what goes into one pass of an op and of what comes out."""

    splits: Splits
    inputs: NameTree
    outputs: NameTree

    def of(self, arrays: Any, results: Any) -> "CallNames":
        """The names for arrays and results of these ranks, flat."""
        inputs = tuple(_names(self.inputs, arrays))
        outputs = tuple(_names(self.outputs, results))
        wanted = set(self.splits.free.split())
        every = {name for names in (*inputs, *outputs) for name in names}
        free = {name for name in every if name in wanted or _stem(name) in wanted}
        shared = frozenset(self.splits.shared.split())
        return CallNames(inputs, outputs, frozenset(free), shared, self.splits.told_axes)


@dataclass(frozen=True)
class CallNames:
    """The names of one call's arrays, flat, and what is needed to split them."""

    inputs: tuple[Names, ...]
    outputs: tuple[Names, ...]
    free: frozenset[str]
    shared: frozenset[str]
    told_axes: bool

    def only(self, outputs: Sequence[int]) -> "CallNames":
        """The same call with these of its outputs."""
        return replace(self, outputs=tuple(self.outputs[at] for at in outputs))

    def batched(self, inputs: Sequence[bool]) -> "CallNames":
        """The call of a whole batch: a first dimension more where said, and in all outputs."""
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
        """The axes that split each name, given how the inputs are split.

        Earlier inputs decide; an axis splits one name, and only where all pieces are equal.

        Args:
            specs: Of the inputs.
            shapes: Of the inputs.
            sizes: Of the mesh axes.
        """
        found: dict[str, Axes] = {}
        taken: set[str] = set()
        for names, spec in zip(self.inputs, specs, strict=True):
            for name, axes in zip(names, spec, strict=True):
                if name in found or name not in self.free:
                    continue
                ours = tuple(takewhile(lambda axis: axis not in taken, axes))
                while ours and not self._divides(ways_of(ours, sizes), name, shapes):
                    ours = ours[:-1]
                if ours:
                    found[name] = ours
                    taken.update(ours)
        return found

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
    """How an array with these names is split."""
    return PartitionSpec(*(assignment.get(name) for name in names))


def summed_axes(names: Names, assignment: Assignment) -> Axes:
    """The axes over which an output with these names is a sum of what each device has."""
    return tuple(axis for name, axes in assignment.items() if name not in names for axis in axes)


def add_up(x: jax.Array, axes: Axes) -> jax.Array:
    """The sum over mesh axes, of which there may be none."""
    return jax.lax.psum(x, axes) if axes else x


def repeat_shared(x: jax.Array, names: Names, ways: Mapping[str, int]) -> jax.Array:
    """`x` with its elements repeated along dimensions too short to be split so many ways."""
    for at, name in enumerate(names):
        if x.shape[at] % ways.get(name, 1):
            x = jnp.repeat(x, ways[name] // x.shape[at], axis=at)
    return x


def add_up_shared(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    """The gradient of what `repeat_shared` was given, from that of what it gave."""
    for at, size in enumerate(shape):
        if x.shape[at] != size:
            apart = x.reshape(*x.shape[:at], size, -1, *x.shape[at + 1 :])
            x = apart.sum(at + 1, dtype=x.dtype)
    return x


def ways_of(axes: Axes, sizes: Mapping[str, int]) -> int:
    """The number of pieces these axes split a dimension into."""
    return math.prod(sizes[axis] for axis in axes)


def _names(texts: Any, arrays: Any) -> Iterator[Names]:
    """The names of each array in a tree, by the texts in a tree like it."""
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
    if not texts:  # nothing was said of these arrays: nothing of them is split
        for leaf in jax.tree.leaves(arrays):
            yield _expand("", leaf.shape)
        return
    raise TPUKernelError(
        f"The dimensions are named {texts!r}, and there are {len(jax.tree.leaves(arrays))} arrays "
        "in another arrangement; give one text for each array."
    )


def _expand(text: str, shape: Sequence[int]) -> Names:
    names, rank = text.split(), len(shape)
    if names[:1] == [LEADING]:
        leading = rank - len(names) + 1
        names = [f"{LEADING}{number}" for number in range(leading)] + names[1:]
    missing = rank - len(names)
    if missing > 0 and text:
        raise TPUKernelError(
            f"The dimensions of an array are named {text!r} and it has {rank} of them; name all."
        )
    names = [UNNAMED] * missing + names[max(0, -missing) :]
    # One element belongs to all pieces: a mask for all heads, a head of keys for all queries.
    return tuple(UNNAMED if size == 1 else name for name, size in zip(names, shape, strict=True))


def _stem(name: str) -> str:
    return LEADING if name.startswith(LEADING) else name

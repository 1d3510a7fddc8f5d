"""Matrices of a model: parameters by the products they are multiplied in."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from .view import View, axes_of


@dataclass(frozen=True, slots=True)
class MatrixAxes:
    """Which axes of a parameter are what: (stack, inputs, outputs), each in their order.

    Attributes:
        shape: Of the parameter.
        stack: Axes of several matrices: layers, experts.
        inputs: Axes that products sum over.
        outputs: All others.
    """

    shape: tuple[int, ...]
    stack: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Inputs of a matrix."""
        return int(np.prod([self.shape[axis] for axis in self.inputs]))

    @property
    def columns(self) -> int:
        """Outputs of a matrix."""
        return int(np.prod([self.shape[axis] for axis in self.outputs], dtype=int))

    @property
    def stack_shape(self) -> tuple[int, ...]:
        """How many matrices there are."""
        return tuple(self.shape[axis] for axis in self.stack)

    @property
    def count(self) -> int:
        """How many matrices there are."""
        return int(np.prod(self.stack_shape, dtype=int))

    def indices(self) -> Iterator[tuple[int, ...]]:
        """The index of each matrix, in order."""
        return itertools.product(*map(range, self.stack_shape))

    @property
    def order(self) -> tuple[int, ...]:
        """The permutation from the parameter to (stack, inputs, outputs)."""
        return (*self.stack, *self.inputs, *self.outputs)


class Contraction(NamedTuple):
    """Which axes of a product's weight are summed over, and which belong to a batch of it."""

    contracted: tuple[int, ...]
    batch: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredProduct:
    """A product of activations with a part of a parameter, as it stands in a program.

    Attributes:
        leaf: The parameter's number.
        view: The part.
        contraction: What is summed over.
    """

    leaf: int
    view: View
    contraction: Contraction

    def matrix_axes(self, shape: tuple[int, ...]) -> MatrixAxes | None:
        """What the product makes of the parameter's axes; None where it takes a piece of them."""
        view = self.view
        summed, free = self.contraction.contracted, self._free()
        found = [
            [axes_of(view.shape[axis], view.strides[axis], shape) for axis in axes]
            for axes in (summed, free)
        ]
        if any(axes is None for group in found for axes in group):
            return None
        inputs, outputs = (
            tuple(sorted(axis for axes in group for axis in axes or ())) for group in found
        )
        rest = set(range(len(shape))) - {*inputs, *outputs}
        ones = {axis for axis in rest if shape[axis] == 1}
        if not inputs or len({*inputs, *outputs}) < len(inputs) + len(outputs):
            return None
        # An axis of one element belongs to the outputs, unless layers or experts come before it.
        kept = tuple(sorted(rest - ones | {axis for axis in ones if axis < min(inputs)}))
        outputs = tuple(sorted({*outputs, *(ones - {*kept})}))
        return MatrixAxes(shape, kept, inputs, outputs)

    def stack_indices(self, axes: MatrixAxes) -> list[tuple[int, ...]] | None:
        """The matrix at each step of the loops and each element of the batch, in that order."""
        view = self.view
        ranges = [
            *view.loops,
            *((view.shape[axis], view.strides[axis]) for axis in self.contraction.batch),
        ]
        found: list[tuple[int, ...]] = []
        for steps in itertools.product(*(range(size) for size, _ in ranges)):
            place = view.offset + sum(
                step * stride for step, (_, stride) in zip(steps, ranges, strict=True)
            )
            at = np.unravel_index(place, axes.shape)
            if any(at[axis] for axis in (*axes.inputs, *axes.outputs)):
                return None
            found.append(tuple(int(at[axis]) for axis in axes.stack))
        return found

    def _free(self) -> tuple[int, ...]:
        used = {*self.contraction.contracted, *self.contraction.batch}
        return tuple(axis for axis in range(len(self.view.shape)) if axis not in used)

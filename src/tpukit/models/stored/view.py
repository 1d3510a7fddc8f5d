"""Views: which elements of a parameter a value in a program is, and which axes are a matrix."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of an array of this shape."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


@dataclass(frozen=True, slots=True)
class View:
    """Elements of a parameter at index · strides + offset, as in numpy.

    Attributes:
        shape: The shape of the value.
        strides: One stride per axis, in elements; 0 for an axis of size 1.
        offset: The offset of the first element.
        loops: (size, stride) of the enclosing scans, outermost first. Each scan steps along an
            axis of the parameter that the value does not have.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    loops: tuple[tuple[int, int], ...] = ()

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "View":
        """Return the view of a full parameter."""
        return cls(tuple(shape), row_major(shape))

    def transposed(self, order: Sequence[int]) -> "View":
        """Return the view with its axes in another order."""
        return replace(
            self,
            shape=tuple(self.shape[axis] for axis in order),
            strides=tuple(self.strides[axis] for axis in order),
        )

    def squeezed(self, axes: Sequence[int]) -> "View":
        """Return the view without some axes of size 1."""
        gone = {axis % len(self.shape) for axis in axes}
        kept = [axis for axis in range(len(self.shape)) if axis not in gone]
        return self.transposed(kept)

    def expanded(self, shape: Sequence[int], axes: Sequence[int]) -> "View | None":
        """Return the view with new axes of size 1, or None where elements would be repeated."""
        strides = [0] * len(shape)
        for own, axis in enumerate(axes):
            if shape[axis] != self.shape[own]:
                return None
            strides[axis] = self.strides[own]
        if any(size != 1 for axis, size in enumerate(shape) if axis not in axes):
            return None
        return replace(self, shape=tuple(shape), strides=tuple(strides))

    def sliced(
        self, starts: Sequence[int], limits: Sequence[int], steps: Sequence[int] | None = None
    ) -> "View":
        """Return the view from `starts` to `limits`."""
        steps = steps or [1] * len(self.shape)
        cuts = zip(starts, limits, steps, strict=True)
        begun = zip(starts, self.strides, strict=True)
        return replace(
            self,
            shape=tuple(-(-(limit - start) // step) for start, limit, step in cuts),
            strides=tuple(s * step for s, step in zip(self.strides, steps, strict=True)),
            offset=self.offset + sum(start * stride for start, stride in begun),
        )

    def reshaped(self, shape: Sequence[int]) -> "View | None":
        """Return the view in another shape, or None where elements would have to move."""
        old = [(n, s) for n, s in zip(self.shape, self.strides, strict=True) if n != 1]
        new = [size for size in shape if size != 1]
        found: list[int] = []
        at = 0
        while len(found) < len(new):
            first, wanted, have = at, 1, 1
            group: list[int] = []
            while not group or wanted != have:
                if group and wanted > have:
                    have *= old[at][0]
                    at += 1
                elif not group or wanted < have:
                    wanted *= new[len(found) + len(group)]
                    group.append(new[len(found) + len(group)])
                    if at == first:
                        have *= old[at][0]
                        at += 1
            together = old[first:at]
            pairs = itertools.pairwise(together)
            if any(outer[1] != inner[0] * inner[1] for outer, inner in pairs):
                return None
            found += [together[-1][1] * stride for stride in row_major(group)]
        strides = iter(found)
        return replace(
            self,
            shape=tuple(shape),
            strides=tuple(0 if size == 1 else next(strides) for size in shape),
        )

    def in_loop(self) -> "View":
        """Return the view inside a scan over the first axis."""
        return replace(
            self,
            shape=self.shape[1:],
            strides=self.strides[1:],
            loops=(*self.loops, (self.shape[0], self.strides[0])),
        )

    def at(self, step: int) -> "View":
        """Return the view in iteration `step` of a scan over the first axis."""
        return replace(
            self,
            shape=self.shape[1:],
            strides=self.strides[1:],
            offset=self.offset + step * self.strides[0],
        )


def axes_of(size: int, stride: int, shape: Sequence[int]) -> tuple[int, ...] | None:
    """Return the adjacent parameter axes that an axis of a view covers.

    The result is None where it covers no complete axes.
    """
    if size == 1:
        return ()
    strides = row_major(shape)
    inner = [a for a, n in enumerate(shape) if n != 1 and strides[a] == stride]
    if not inner:
        return None
    axis, covered = inner[-1], shape[inner[-1]]
    found = [axis]
    while covered < size and axis > 0:
        axis -= 1
        covered *= shape[axis]
        found.append(axis)
    return tuple(reversed(found)) if covered == size else None


@dataclass(frozen=True, slots=True)
class MatrixAxes:
    """The roles of a parameter's axes: stack, inputs, outputs.

    Attributes:
        shape: The shape of the parameter.
        stack: Axes of several matrices: layers, experts.
        inputs: Axes that matmuls sum over.
        outputs: All other axes.
    """

    shape: tuple[int, ...]
    stack: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    @property
    def rows(self) -> int:
        """The number of inputs of a matrix."""
        return int(np.prod([self.shape[axis] for axis in self.inputs]))

    @property
    def columns(self) -> int:
        """The number of outputs of a matrix."""
        return int(np.prod([self.shape[axis] for axis in self.outputs], dtype=int))

    @property
    def stack_shape(self) -> tuple[int, ...]:
        """The sizes of the stack axes."""
        return tuple(self.shape[axis] for axis in self.stack)

    @property
    def count(self) -> int:
        """The number of matrices."""
        return int(np.prod(self.stack_shape, dtype=int))

    def indices(self) -> Iterator[tuple[int, ...]]:
        """Yield the index of each matrix, in order."""
        return itertools.product(*map(range, self.stack_shape))

    @property
    def order(self) -> tuple[int, ...]:
        """The permutation from the parameter to (stack, inputs, outputs)."""
        return (*self.stack, *self.inputs, *self.outputs)


class Contraction(NamedTuple):
    """The contracted axes and the batch axes of a matmul's weight."""

    contracted: tuple[int, ...]
    batch: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredMatmul:
    """A matmul of activations with a view of a parameter.

    Attributes:
        leaf: The parameter's number.
        view: The view.
        contraction: The contracted and batch axes.
    """

    leaf: int
    view: View
    contraction: Contraction

    def matrix_axes(self, shape: tuple[int, ...]) -> MatrixAxes | None:
        """Return the roles of the parameter's axes, or None where the matmul uses parts of them."""
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
        # An axis of size 1 belongs to the outputs, unless it comes before the inputs.
        kept = tuple(sorted(rest - ones | {axis for axis in ones if axis < min(inputs)}))
        outputs = tuple(sorted({*outputs, *(ones - {*kept})}))
        return MatrixAxes(shape, kept, inputs, outputs)

    def stack_indices(self, axes: MatrixAxes) -> list[tuple[int, ...]] | None:
        """Return the matrix of each scan iteration and each batch element, in that order."""
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

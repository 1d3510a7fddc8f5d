"""Where in a parameter a value lies: a parameter that was cut, turned or reshaped, not computed."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """The strides, in elements, of an array of this shape."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


@dataclass(frozen=True, slots=True)
class View:
    """Elements of a parameter, by numpy's rule: index · strides + offset, in elements.

    Attributes:
        shape: Of the value.
        strides: One for each axis; 0 where it has one element.
        offset: Of the first element.
        loops: (size, stride) of the loops around it, outermost first: each takes one step along
            an axis that the value does not have.
    """

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int = 0
    loops: tuple[tuple[int, int], ...] = ()

    @classmethod
    def whole(cls, shape: Sequence[int]) -> "View":
        """All of a parameter."""
        return cls(tuple(shape), row_major(shape))

    def transposed(self, order: Sequence[int]) -> "View":
        """With its axes in another order."""
        return replace(
            self,
            shape=tuple(self.shape[axis] for axis in order),
            strides=tuple(self.strides[axis] for axis in order),
        )

    def squeezed(self, axes: Sequence[int]) -> "View":
        """Without some axes of one element."""
        gone = {axis % len(self.shape) for axis in axes}
        kept = [axis for axis in range(len(self.shape)) if axis not in gone]
        return self.transposed(kept)

    def expanded(self, shape: Sequence[int], axes: Sequence[int]) -> "View | None":
        """With new axes of one element, its own ones at `axes`; None where any is repeated."""
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
        """From `starts` up to `limits`."""
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
        """In another shape; None where that would have to move elements."""
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
        """What one step of a loop over the first axis sees."""
        return replace(
            self,
            shape=self.shape[1:],
            strides=self.strides[1:],
            loops=(*self.loops, (self.shape[0], self.strides[0])),
        )

    def at(self, step: int) -> "View":
        """What step number `step` of a loop over the first axis sees."""
        return replace(
            self,
            shape=self.shape[1:],
            strides=self.strides[1:],
            offset=self.offset + step * self.strides[0],
        )


def axes_of(size: int, stride: int, shape: Sequence[int]) -> tuple[int, ...] | None:
    """The neighbouring axes of a parameter of this shape that an axis of a view runs through.

    None where it runs through no whole axes.
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

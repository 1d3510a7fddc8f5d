"""Slice shapes: which ones a generation has, where they wrap, and how hosts tile them."""

import math
import re
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations_with_replacement

from ..errors import SliceError

Shape = tuple[int, ...]

_SHAPE = re.compile(r"[1-9]\d{0,4}(?:x[1-9]\d{0,4}){1,2}", re.ASCII)


def parse_shape(text: str) -> Shape:
    """Read "4x4x8" (case and spaces do not matter) as (4, 4, 8)."""
    compact = "".join(text.lower().split()).replace("×", "x").replace("*", "x")
    if not _SHAPE.fullmatch(compact):
        raise SliceError(
            f"{text!r} is not a topology; write two or three chip counts, such as '4x4' or '4x4x8'."
        )
    return tuple(int(length) for length in compact.split("x"))


def format_shape(shape: Shape) -> str:
    """Write (4, 4, 8) as "4x4x8"."""
    return "x".join(str(length) for length in shape)


@dataclass(frozen=True)
class CubeRules:
    """Slices made of whole cubes.

    Attributes:
        edge: Chips along each side of a cube.
        max_chips: The most chips of one slice.
        max_axis: The longest axis a slice may have.
    """

    edge: int
    max_chips: int
    max_axis: int

    def shapes(self) -> set[Shape]:
        """Every shape, its shortest axis first."""
        lengths = range(self.edge, self.max_axis + 1, self.edge)
        return {
            (a, b, c)
            for a, b, c in combinations_with_replacement(lengths, 3)
            if a * b * c <= self.max_chips
        }


@dataclass(frozen=True)
class TopologyRules:
    """The slice shapes of one generation.

    Attributes:
        dims: Axes of the torus, 2 or 3.
        listed_shapes: Shapes offered by name; for 3D generations those below one whole cube.
        cubes: Rules of larger 3D shapes, which consist of whole cubes; or None.
        wrap_length: A 2D axis this long is closed to a ring. 3D slices of whole cubes wrap
            on every axis and smaller ones on none.
        host_bounds: Chips of one host on each axis (always three numbers, for libtpu).
        single_host_shapes: Shapes served by one host, even when larger than `host_bounds`.
    """

    dims: int
    listed_shapes: tuple[Shape, ...]
    cubes: CubeRules | None
    wrap_length: int | None
    host_bounds: tuple[int, int, int]
    single_host_shapes: tuple[Shape, ...]

    @cached_property
    def shapes(self) -> tuple[Shape, ...]:
        """Every legal shape, smallest first; of one size, the most cubic first."""
        shapes = set(self.listed_shapes)
        if self.cubes:
            shapes |= self.cubes.shapes()
        return tuple(sorted(shapes, key=lambda s: (math.prod(s), sum(s), s)))

    @cached_property
    def by_chips(self) -> dict[int, tuple[Shape, ...]]:
        """Legal shapes by the number of chips; the first of each is the default."""
        grouped: dict[int, tuple[Shape, ...]] = {}
        for shape in self.shapes:
            chips = math.prod(shape)
            grouped[chips] = (*grouped.get(chips, ()), shape)
        return grouped

    def is_legal(self, shape: Shape) -> bool:
        """Whether the generation has slices of this shape."""
        return shape in self.by_chips.get(math.prod(shape), ())

    def nearest_counts(self, chips: int, *, most: int = 4) -> list[int]:
        """The legal chip counts nearest to `chips`, in order of size."""
        nearest = sorted(self.by_chips, key=lambda legal: abs(legal - chips))[:most]
        return sorted(nearest)

    def wraps(self, shape: Shape) -> tuple[bool, ...]:
        """Whether the ends of each axis are linked into a ring."""
        if self.cubes:
            whole_cubes = all(length % self.cubes.edge == 0 for length in shape)
            return (whole_cubes,) * len(shape)
        return tuple(length == self.wrap_length for length in shape)

    def hosts(self, shape: Shape) -> int:
        """Host machines that serve the shape."""
        return math.prod(shape) // math.prod(self.bounds_of_host(shape))

    def bounds_of_host(self, shape: Shape) -> tuple[int, int, int]:
        """Chips of one host on each of three axes, for this shape."""
        if shape in self.single_host_shapes:
            x, y, z = (*shape, 1)[:3]
            return (x, y, z)
        return self.host_bounds

    def bisection_links(self, shape: Shape) -> int:
        """Links cut when the slice is halved across the axis where that cuts fewest.

        An axis closed to a ring is cut in two places. Zero for a single chip.
        """
        wraps = self.wraps(shape)
        chips = math.prod(shape)
        cuts = [
            chips // length * (2 if wrapped else 1)
            for length, wrapped in zip(shape, wraps, strict=True)
            if length > 1
        ]
        return min(cuts, default=0)

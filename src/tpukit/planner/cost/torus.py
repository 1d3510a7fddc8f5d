"""Assign the torus links of each mesh axis in the order of jax."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from ...hardware import Slice

# Mesh order, with the busiest axis last, because jax gives it the shortest paths.
AXES = ("data", "stage", "fsdp", "expert", "context", "tensor")


@dataclass(frozen=True)
class Links:
    """The links of one mesh axis.

    Attributes:
        chips: Chips along the axis; 1 if it stays inside a chip.
        lanes: Links on which a chip receives at once: two per ring, one per open line.
        hops: Hops to the farthest chip and back, for latency.
        all_to_all: `extent / (4 lanes)` of its narrowest line, the divisor of all-to-all bandwidth.
    """

    chips: int = 1
    lanes: float = 1.0
    hops: int = 0
    all_to_all: float = 0.0

    @property
    def share(self) -> float:
        """Share of a gathered array that comes from other chips."""
        return (self.chips - 1) / self.chips


def place_axes(on: Slice, sizes: Mapping[str, int]) -> dict[str, Links]:
    """Return the links of every axis larger than 1; `sizes` are those inside one slice."""
    free = dict(enumerate(on.topology))
    in_chip = on.chip.devices_per_chip
    placed: dict[str, Links] = {}
    for axis in reversed(AXES):
        size = sizes.get(axis, 1)
        if size == 1:
            continue
        shared = math.gcd(size, in_chip)
        in_chip //= shared
        placed[axis] = _links(on, _take(free, size // shared))
    return placed


def _take(free: dict[int, int], size: int) -> dict[int, int]:
    """Remove `size` chips from the free torus axes, whole axes first."""
    for count in range(len(free), 0, -1):
        for axes in itertools.combinations(free, count):
            if math.prod(free[axis] for axis in axes) == size:
                taken = {axis: free[axis] for axis in axes}
                free.update(dict.fromkeys(axes, 1))
                return {axis: length for axis, length in taken.items() if length > 1}
    taken = {}
    for axis in sorted(free, key=lambda axis: free[axis]):
        piece = math.gcd(size, free[axis])
        if piece > 1:
            taken[axis] = piece
            free[axis] //= piece
            size //= piece
    return taken


def _links(on: Slice, extents: Mapping[int, int]) -> Links:
    if not extents:
        return Links()
    rings = {
        axis: on.wraps[axis] and extent == on.topology[axis] for axis, extent in extents.items()
    }
    lanes = {axis: 2.0 if ring else 1.0 for axis, ring in rings.items()}
    return Links(
        chips=math.prod(extents.values()),
        lanes=sum(lanes.values()),
        hops=sum(extent // 2 if rings[axis] else extent - 1 for axis, extent in extents.items()),
        all_to_all=max(extent / (4 * lanes[axis]) for axis, extent in extents.items()),
    )

"""Which links of the torus each mesh axis gets, by the order in which jax hands them out."""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

from ...hardware import Slice

# Mesh order, the chattiest last: jax gives the last axis the shortest paths.
AXES = ("data", "stage", "fsdp", "expert", "context", "tensor")


@dataclass(frozen=True)
class Links:
    """What one mesh axis can send over.

    Attributes:
        chips: Chips along the axis; 1 when it stays inside a chip.
        lanes: Links a chip receives on at once: two for each ring, one for each open line.
        hops: Hops to the farthest chip and back into step, for latency.
        all_to_all: `extent / (4 lanes)` of its narrowest line: what all-to-all is divided by.
    """

    chips: int = 1
    lanes: float = 1.0
    hops: int = 0
    all_to_all: float = 0.0

    @property
    def share(self) -> float:
        """Part of a gathered array that comes from other chips."""
        return (self.chips - 1) / self.chips


def place_axes(on: Slice, sizes: Mapping[str, int]) -> dict[str, Links]:
    """The links of every axis larger than 1, `sizes` being those inside one slice."""
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
    """Remove `size` chips from the free lengths: whole axes where any fit, else pieces of them."""
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

"""Where the chips of each host lie in the torus, in the order in which libtpu counts them.

Hosts tile a slice in blocks of their bounds, and both hosts and the chips of one host are counted
along x first, then y, then z. Process 0 is the first host of the first slice.
"""

from dataclasses import dataclass
from itertools import product
from typing import Any

from .slice import Slice, rules_of
from .topology import Shape


@dataclass(frozen=True, slots=True)
class ChipPosition:
    """One chip of a slice.

    Attributes:
        process: Index of the process on its host.
        chip: Its index on that host.
        slice_index: Which of the slices it is in, from 0.
        coordinates: Position along each axis of the topology.
    """

    process: int
    chip: int
    slice_index: int
    coordinates: tuple[int, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "process": self.process,
            "chip": self.chip,
            "slice_index": self.slice_index,
            "coordinates": list(self.coordinates),
        }


def chip_positions(target: Slice) -> tuple[ChipPosition, ...]:
    """Every chip of a slice, host after host."""
    shape = target.topology
    bounds = rules_of(target.chip).bounds_of_host(shape)[: len(shape)]
    blocks = tuple(length // bound for length, bound in zip(shape, bounds, strict=True))
    found: list[ChipPosition] = []
    process = 0
    for slice_index in range(target.num_slices):
        for block in _along_x_first(blocks):
            corner = tuple(at * bound for at, bound in zip(block, bounds, strict=True))
            for chip, inside in enumerate(_along_x_first(bounds)):
                at = tuple(start + step for start, step in zip(corner, inside, strict=True))
                found.append(ChipPosition(process, chip, slice_index, at))
            process += 1
    return tuple(found)


def _along_x_first(shape: Shape) -> list[tuple[int, ...]]:
    return [at[::-1] for at in product(*(range(length) for length in reversed(shape)))]

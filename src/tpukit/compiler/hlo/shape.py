"""Shapes as the TPU compiler prints them: format, dimensions, layout, tiles, memory space."""

import math
import re
from dataclasses import dataclass
from functools import cached_property, lru_cache

from ...errors import XLACompilationError
from ...hardware.formats import FORMATS
from ...plain_data import damaged_as

# Bits of one element, by the name that the compiler prints; sub-byte formats are packed.
ELEMENT_BITS = {**{format.hlo: format.bits for format in FORMATS}, "token": 0}
reads_program = damaged_as(
    XLACompilationError,
    "the program's text is damaged ({}); pass what the compiler printed, whole.",
)
HBM, VMEM, SMEM, HOST = 0, 1, 2, 5
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,<=?]*)\](?:\{([^}]*)\})?")
_COMMENT = re.compile(r"/\*.*?\*/")
_TILE = re.compile(r"\(([\d,*]*)\)")
_SPACE = re.compile(r"S\((\d+)\)")


@dataclass(frozen=True)
class Shape:
    """One array: its number format, dimensions, layout and memory space.

    Attributes:
        layout: Dimension numbers from the fastest-varying to the slowest.
        tiles: Tilings, outermost first, e.g. `((8, 128), (2, 1))` for bf16 on TPU.
        memory_space: 0 HBM, 1 VMEM, 2 SMEM, 5 pinned host memory.
    """

    dtype: str
    dims: tuple[int, ...]
    layout: tuple[int, ...] = ()
    tiles: tuple[tuple[int, ...], ...] = ()
    memory_space: int = HBM

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        """Bytes of the elements, without padding."""
        return (self.elements * ELEMENT_BITS[self.dtype] + 7) // 8

    @cached_property
    def padded_bytes(self) -> int:
        """Bytes including the padding of the fastest dimensions to the first tile."""
        if not self.tiles or not self.dims:
            return self.bytes
        tile = self.tiles[0]
        order = self.layout or tuple(range(len(self.dims) - 1, -1, -1))
        physical = [self.dims[index] for index in reversed(order)]
        missing = len(tile) - len(physical)
        physical = [1] * missing + physical
        for offset, size in enumerate(reversed(tile), start=1):
            physical[-offset] = -(-physical[-offset] // size) * size
        return (math.prod(physical) * ELEMENT_BITS[self.dtype] + 7) // 8

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@lru_cache(maxsize=65536)
@reads_program
def parse_shapes(text: str) -> tuple[Shape, ...]:
    """Return the arrays of a type, in order; the arrays of a tuple are its leaves."""
    return tuple(_shape(match) for match in _SHAPE.finditer(text))


@lru_cache(maxsize=4096)
def tuple_elements(text: str) -> tuple[str, ...]:
    """Return the types of a tuple's elements, which may be tuples again; an array has none."""
    if not text.startswith("("):
        return ()
    inside = _COMMENT.sub("", text)[1:-1]
    elements: list[str] = []
    depth = begun = 0
    for position, character in enumerate(inside):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            elements.append(inside[begun:position].strip())
            begun = position + 1
    return (*elements, inside[begun:].strip())


def _shape(match: re.Match[str]) -> Shape:
    dtype, sizes, details = match.groups()
    if dtype not in ELEMENT_BITS:
        raise XLACompilationError(f"the compiler printed an unknown number format: {dtype!r}.")
    dims = tuple(int(size.strip("<=?")) for size in sizes.split(",") if size)
    order, _, rest = (details or "").partition(":")
    layout = tuple(int(index) for index in order.split(",") if index)
    tiling = rest.partition("T")[2] if rest.startswith("T") else ""
    tiles = _tiles(tiling)
    space = _SPACE.search(rest)
    if (layout and sorted(layout) != list(range(len(dims)))) or any(0 in tile for tile in tiles):
        raise ValueError(f"{match[0]:.60} has a layout of other dimensions")
    return Shape(dtype, dims, layout, tiles, int(space[1]) if space else HBM)


def _tiles(text: str) -> tuple[tuple[int, ...], ...]:
    tiles: list[tuple[int, ...]] = []
    position = 0
    while match := _TILE.match(text, position):
        tiles.append(tuple(1 if size == "*" else int(size) for size in match[1].split(",") if size))
        position = match.end()
    return tuple(tiles)

"""What the kernels do with given tiles: FLOPs of the tiles they visit, bytes they move."""

from dataclasses import dataclass, replace

Tiles = tuple[int, int, int]  # rows, and the two sizes of a kernel's weight tile


@dataclass(frozen=True)
class GroupedShape:
    """A grouped product: rows (M, width) times weights (groups, width, columns).

    Attributes:
        rows: Those that belong to a group.
        empty_rows: Those that belong to nobody, whose results are written and nothing else.
    """

    rows: int
    width: int
    columns: int
    groups: int
    itemsize: int
    empty_rows: int = 0

    @property
    def transposed(self) -> "GroupedShape":
        """The shape of the gradient of lhs: width and columns exchanged."""
        return replace(self, width=self.columns, columns=self.width)


@dataclass(frozen=True)
class GroupedWork:
    """What one kernel does.

    Attributes:
        flops: Of whole tiles, as the matrix unit does them.
        hbm_bytes: Read and written.
        steps: Of its grid.
        parts: Of the grid's first dimension, which the cores of a device share.
    """

    flops: int
    hbm_bytes: int
    steps: int
    parts: int


def product_work(shape: GroupedShape, tiles: Tiles) -> GroupedWork:
    """The product, or the gradient of lhs with width and columns exchanged.

    The grid goes through the columns, the visits and the contraction, so a weight tile that holds
    the whole contraction stays while its group does.
    """
    tile_rows, tile_sum, tile_columns = tiles
    visits = _visits(shape, tile_rows)
    sums, across = -(-shape.width // tile_sum), -(-shape.columns // tile_columns)
    padded = sums * tile_sum * across * tile_columns
    weights = padded * (shape.groups if sums == 1 else visits)
    rows = (shape.rows if sums == 1 else visits * tile_rows) * sums * tile_sum * across
    moved = weights + rows + (shape.rows + shape.empty_rows) * shape.columns
    return GroupedWork(
        flops=2 * visits * tile_rows * padded,
        hbm_bytes=moved * shape.itemsize,
        steps=visits * sums * across,
        parts=across,
    )


def drhs_work(shape: GroupedShape, tiles: Tiles) -> GroupedWork:
    """The gradient of the weights: a sum over the visits of each group."""
    tile_rows, tile_width, tile_columns = tiles
    visits = _visits(shape, tile_rows)
    down, across = -(-shape.width // tile_width), -(-shape.columns // tile_columns)
    width, columns = down * tile_width, across * tile_columns
    read = visits * tile_rows * (width * across + columns * down)
    written = shape.groups * shape.width * shape.columns
    return GroupedWork(
        flops=2 * visits * tile_rows * width * columns,
        hbm_bytes=(read + written) * shape.itemsize,
        steps=visits * down * across,
        parts=down,
    )


def _visits(shape: GroupedShape, tile_rows: int) -> int:
    """Tiles, and one more visit for every further group: it begins inside a tile."""
    return -(-shape.rows // tile_rows) + shape.groups - 1

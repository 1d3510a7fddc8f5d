"""Work of a grouped matrix product and its two gradients, by tiles visited or group by group."""

import math
from dataclasses import dataclass

from kernel_rows.rows import COMPILER_CHANGED, Device, Row

LANES = 128
TILES_RENAMED = "2026-05"
# What a kernel whose tiles are not given is taken to use.
NOMINAL_TILES = (512, 1024, 1024)
# The compiler's own tiles: as large as two buffers of everything leave room for. Read from the
# `ragged_dot_tiling` it writes beside each call (libtpu 0.0.42.1, 80 shapes), the same in all.
COMPILER_VMEM_BYTES = {128: 8 * 2**20, 256: 24 * 2**20}


@dataclass(frozen=True)
class Sizes:
    """m rows in groups, each row times its group's (k, n) matrix."""

    variant: str
    m: int
    k: int
    n: int
    groups: int
    item_bytes: float
    group_sizes: tuple[int, ...]

    @classmethod
    def of(cls, row: Row) -> "Sizes":
        """The sizes a row names."""
        d = row.dims
        even = (d["m"] // d["num_groups"],) * d["num_groups"]
        return cls(
            d["variant"],
            d["m"],
            d["k"],
            d["n"],
            d["num_groups"],
            row.item_bytes("lhs"),
            row.group_sizes or even,
        )

    @property
    def is_weight_gradient(self) -> bool:
        """The groups are contracted over: (k, m) x (m, n) for each."""
        return self.variant.startswith("drhs")

    def visits(self, tile_m: int) -> int:
        """Pairs of a group and a tile of rows that have a row in common."""
        start = total = 0
        for size in self.group_sizes:
            if size:
                total += (start + size - 1) // tile_m - start // tile_m + 1
            start += size
        return max(total, 1)


def regime(row: Row) -> str:
    """Which program a row ran: the three products differ, and XLA's changed in March 2026."""
    variant = row.dims["variant"].split("_")[0]
    old = row.impl == "xla" and row.old_compiler
    return f"{variant}_before_{COMPILER_CHANGED}" if old else variant


def terms(row: Row, device: Device) -> dict[str, float]:
    """Padded products, traffic of each operand, grid steps, and one product with every group."""
    sizes = Sizes.of(row)
    tile_m, tile_k, tile_n = _tiles(row, sizes, device)
    is_dlhs = sizes.variant.startswith("dlhs")
    visits = sizes.visits(tile_m)
    k_tiles, n_tiles = math.ceil(sizes.k / tile_k), math.ceil(sizes.n / tile_n)
    rows = float(visits) * tile_m
    k_padded, n_padded = _padded(sizes.k, tile_k, device), _padded(sizes.n, tile_n, device)
    item = sizes.item_bytes
    if sizes.is_weight_gradient:
        left, right = rows * sizes.k * n_tiles * item, rows * sizes.n * k_tiles * item
        out = float(sizes.groups) * sizes.k * sizes.n * 2
    else:
        left = rows * sizes.k * n_tiles * item
        weights = sizes.groups if k_tiles == 1 else visits
        right = float(weights) * sizes.k * sizes.n * item
        out = rows * sizes.n * 2
    products = device.mxu_us(2 * rows * k_padded * n_padded)
    traffic = device.hbm_us(left + right + out)
    residual = sizes.m * sizes.n * 2.0 if row.static_args.get("return_residuals") else 0.0
    every_group = device.mxu_us(2.0 * sizes.m * sizes.k * sizes.n * sizes.groups)
    through_xla = row.impl == "xla"
    return {
        "launch": 1.0,
        "products": products,
        "float32_result": device.hbm_us(out * 2) if through_xla else 0.0,
        "weights_transposed": device.hbm_us(right) if through_xla and is_dlhs else 0.0,
        "traffic": traffic,
        "the_slower": max(products, traffic),
        "weights": device.hbm_us(right if not sizes.is_weight_gradient else out),
        "rows_in_and_out": device.hbm_us((sizes.m * (sizes.k + sizes.n)) * 2.0),
        "steps": float(visits) * k_tiles * n_tiles,
        "residuals": device.hbm_us(residual),
        "eight_bits": products if item == 1 else 0.0,
        "unaligned": traffic if sizes.k % LANES or sizes.n % LANES else 0.0,
        "every_group": every_group,
        "every_group_narrow": every_group if sizes.n <= 1024 < sizes.k else 0.0,
    }


def compiler_tiles(sizes: Sizes, device: Device) -> tuple[int, int, int]:
    """The tiles XLA takes for a grouped product: all of k, and as much of n as fits."""
    step = device.mxu_size
    room = COMPILER_VMEM_BYTES[step] // 2

    def fits(tile_k: int, tile_n: int) -> bool:
        return step * tile_k * 2 + tile_k * tile_n * 2 + 2 * step * tile_n * 4 < room

    tile_k = max([sizes.k, *range(step, sizes.k, step)], key=lambda k: k * fits(k, step))
    tile_n = max(range(step, sizes.n + step, step), key=lambda n: n * fits(tile_k, n))
    return step, tile_k, min(tile_n, sizes.n)


def named_tiles(row: Row) -> tuple[int, int, int]:
    """The tiles of a row's config over m, k and n of its own dimensions."""
    tile_m, tile_k, tile_n = (
        row.config.get(name) or nominal
        for name, nominal in zip(("tile_m", "tile_k", "tile_n"), NOMINAL_TILES, strict=True)
    )
    # Of a gradient for the rows, later kernels name the tiles after the forward product.
    too_large = tile_k >= row.dims["k"] + LANES or tile_n >= row.dims["n"] + LANES
    renamed = row.source_date >= TILES_RENAMED or too_large
    if row.dims["variant"].startswith("dlhs") and renamed:
        tile_k, tile_n = tile_n, tile_k
    return tile_m, tile_k, tile_n


def _tiles(row: Row, sizes: Sizes, device: Device) -> tuple[int, int, int]:
    if row.impl == "xla" and not sizes.is_weight_gradient:
        return compiler_tiles(sizes, device)
    tile_m, tile_k, tile_n = named_tiles(row)
    return min(tile_m, max(sizes.m, 8)), min(tile_k, sizes.k), min(tile_n, sizes.n)


def _padded(size: int, tile: int, device: Device) -> float:
    """A size in whole tiles of whole matrix-unit passes."""
    return float(math.ceil(size / tile)) * device.pad(tile)

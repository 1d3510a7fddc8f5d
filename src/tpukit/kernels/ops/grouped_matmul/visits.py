"""Plan which tiles of rows a grouped matmul multiplies by which group's weight.

Groups of rows follow each other and end anywhere, so a tile of rows may contain several groups. A
visit is a (group, tile) pair with rows in common. In the order of groups, visits of one tile are
neighbours, and so are visits of one group.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ...partition.splits import Axes


class Visits(NamedTuple):
    """The table, for scalar memory. Only the first `visits` entries are used."""

    group: jax.Array  # (most visits,) int32
    tile: jax.Array  # (most visits,) int32
    filled: jax.Array  # (most visits,) int32: the tile, or the last one with rows of a group
    offsets: jax.Array  # (groups + 1,) int32: where each group begins, and the last one ends
    visits: jax.Array  # () int32: how many are used


def plan_visits(group_sizes: jax.Array, *, rows: int, tile_rows: int, each_group: bool) -> Visits:
    """Return the visits of `rows` rows in tiles of `tile_rows`.

    Args:
        group_sizes: (G,) rows of each group; their sum may be less than `rows`.
        rows: Rows of the array.
        tile_rows: Rows of a tile.
        each_group: True visits groups without rows once, for a result with a part for every group.
            False also visits the rows of no group, as group G, for a result with every row.
    """
    sizes = group_sizes.astype(jnp.int32)
    if not each_group:
        sizes = jnp.append(sizes, rows - sizes.sum())
    groups, tiles = sizes.shape[0], -(-rows // tile_rows)
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    starts = ends - sizes
    first_tile = jnp.minimum(starts // tile_rows, tiles - 1)
    tiles_of_group = jnp.where(sizes > 0, -(-ends // tile_rows) - first_tile, int(each_group))
    after = jnp.cumsum(tiles_of_group, dtype=jnp.int32)
    # Every visit but a group's first opens a tile, and two groups share at most one tile.
    most = tiles + groups - 1
    group = jnp.repeat(
        jnp.arange(groups, dtype=jnp.int32), tiles_of_group, total_repeat_length=most
    )
    place = jnp.arange(most, dtype=jnp.int32) - (after - tiles_of_group)[group]
    tile = jnp.minimum(first_tile[group] + place, tiles - 1).astype(jnp.int32)
    last_filled = jnp.maximum(group_sizes.sum() - 1, 0).astype(jnp.int32) // tile_rows
    filled = jnp.minimum(tile, last_filled)
    offsets = jnp.append(starts, ends[-1])
    return Visits(group, tile, filled, offsets.astype(jnp.int32), after[-1])


def shard_sizes(group_sizes: jax.Array, rows: int, axes: Axes) -> jax.Array:
    """Return the group sizes within this device's shard of `rows` rows."""
    if not axes:
        return group_sizes
    ends = jnp.cumsum(group_sizes) - jax.lax.axis_index(axes) * rows
    inside = jnp.clip(ends, 0, rows) - jnp.clip(ends - group_sizes, 0, rows)
    return inside.astype(group_sizes.dtype)

"""Visits cover every row of every group exactly once, tiles and groups staying together."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tpukit.kernels.ops.grouped_matmul.api import OP
from tpukit.kernels.ops.grouped_matmul.blocks import even_tile
from tpukit.kernels.ops.grouped_matmul.visits import plan_visits
from tpukit.kernels.timing.prefetched import find_pallas_calls

ROWS, TILE_ROWS = 130, 16
plan = jax.jit(plan_visits, static_argnames=("rows", "tile_rows", "each_group"))


@settings(deadline=None)
@given(
    cuts=st.lists(st.integers(0, ROWS), min_size=5, max_size=5).map(sorted),
    each_group=st.booleans(),
)
def test_every_row_is_visited_once_for_its_group(cuts, each_group):
    sizes = np.diff([0, *cuts])
    visits = plan(
        jnp.asarray(sizes, jnp.int32), rows=ROWS, tile_rows=TILE_ROWS, each_group=each_group
    )
    count = int(visits.visits)
    group, tile = np.asarray(visits.group)[:count], np.asarray(visits.tile)[:count]
    offsets = np.asarray(visits.offsets)
    assert count <= visits.group.size
    filled = np.asarray(visits.filled)[:count]
    mine = np.diff(offsets)[group] * (group < len(sizes)) > 0
    np.testing.assert_array_equal(filled[mine], tile[mine])
    assert (filled * TILE_ROWS < max(sizes.sum(), 1)).all(), "rows of nobody are never read"
    owner = np.full(ROWS, -1)
    for g, t in zip(group, tile, strict=True):
        begin, end = max(offsets[g], t * TILE_ROWS), min(offsets[g + 1], (t + 1) * TILE_ROWS)
        assert (owner[begin:end] == -1).all()
        owner[begin:end] = g
    expected = np.repeat(np.arange(len(sizes)), sizes)
    rest = [] if each_group else [len(sizes)] * (ROWS - expected.size)
    np.testing.assert_array_equal(owner[: expected.size + len(rest)], [*expected, *rest])
    assert (np.diff(group) >= 0).all()
    assert (np.diff(tile) >= 0).all()
    if each_group:
        assert set(group) == set(range(len(sizes)))
    else:
        assert set(tile) == set(range(-(-ROWS // TILE_ROWS)))


@given(size=st.integers(1, 20000), most=st.integers(128, 8192))
def test_tiles_are_even(size, most):
    tile = even_tile(size, most)
    parts = -(-size // tile)
    assert tile <= max(most, 128)
    assert tile == size or tile % 128 == 0
    assert parts * tile - size < 128 * parts


def test_the_timer_reads_the_table_that_a_kernel_walks_through():
    case = OP.case("small")
    calls = find_pallas_calls(OP.bind(case), case.arguments, OP.values(case))
    (product,) = calls
    tables = [number for number, shape in enumerate(product.shapes) if len(shape) < 2]
    assert sorted(product.integers) == tables

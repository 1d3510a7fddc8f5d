"""Every way to add up equals the flat sum: exactly on integers, closely otherwise."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, PartitionSpec

from tpukit.pods.multipod.sums import (
    BLOCK,
    DCN,
    ICI,
    AllReduceStrategy,
    PodTopology,
    RoundingResiduals,
    compressed_sum,
    neighbourly_order,
    sum_over_devices,
)

EVERY = PartitionSpec((DCN, ICI))
SHAPES = [(1, 8), (2, 4), (3, 2), (4, 2), (5, 1), (8, 1), (7, 1)]
WAYS = [
    (AllReduceStrategy.FLAT, PodTopology.MESH),
    (AllReduceStrategy.RING, PodTopology.RING),
    *((AllReduceStrategy.HIERARCHICAL, topology) for topology in PodTopology),
]


def mesh_of(pods, chips):
    devices = np.array(jax.devices()[: pods * chips]).reshape(pods, chips)
    return Mesh(devices, (DCN, ICI), axis_types=(AxisType.Auto,) * 2)


def on_devices(function, mesh, *, outs=EVERY):
    return jax.jit(
        jax.shard_map(function, mesh=mesh, in_specs=EVERY, out_specs=outs, check_vma=False)
    )


def add_up(values, pods, chips, strategy, topology, order):
    def one(rows):
        total = sum_over_devices(
            rows[0], strategy=strategy, topology=topology, pods=pods, chips=chips, order=order
        )
        return total[None]

    return np.asarray(on_devices(one, mesh_of(pods, chips))(values))


@pytest.mark.parametrize(("strategy", "topology"), WAYS)
@pytest.mark.parametrize(("pods", "chips"), SHAPES)
def test_integers_add_up_exactly_on_every_device(pods, chips, strategy, topology):
    rng = np.random.default_rng(0)
    size = 24 * pods * chips
    values = rng.integers(-1000, 1000, (pods * chips, size)).astype(np.float32)
    order = list(rng.permutation(pods))
    found = add_up(values, pods, chips, strategy, topology, order)
    assert np.array_equal(found, np.broadcast_to(values.sum(0), values.shape))


@pytest.mark.parametrize(("strategy", "topology"), WAYS)
def test_other_numbers_add_up_as_closely_as_float32_can(strategy, topology):
    values = np.random.default_rng(1).normal(size=(8, 4096)).astype(np.float32)
    found = add_up(values, 4, 2, strategy, topology, range(4))
    truth = values.astype(np.float64).sum(0)
    bound = 8 * np.finfo(np.float32).eps * np.abs(values).sum(0)
    assert (np.abs(found - truth) <= bound).all()


def test_the_hierarchical_form_has_its_three_stages():
    def lowered(strategy, topology):
        def one(rows):
            return sum_over_devices(
                rows[0], strategy=strategy, topology=topology, pods=2, chips=4, order=(0, 1)
            )[None]

        return on_devices(one, mesh_of(2, 4)).lower(jnp.zeros((8, 64))).as_text()

    three = lowered(AllReduceStrategy.HIERARCHICAL, PodTopology.MESH)
    for stage in ("reduce_scatter", "all_reduce", "all_gather"):
        assert stage in three
    assert "collective_permute" in lowered(AllReduceStrategy.HIERARCHICAL, PodTopology.RING)
    assert "reduce_scatter" not in lowered(AllReduceStrategy.FLAT, PodTopology.MESH)


@pytest.mark.parametrize(("pods", "chips"), [(2, 4), (4, 2), (3, 1)])
def test_rounding_loses_only_what_it_still_carries(pods, chips):
    """Over steps, sent sums and residuals together are the true sums, whatever was rounded."""
    size, steps = pods * chips * BLOCK, 12
    rng = np.random.default_rng(2)
    given = rng.normal(size=(steps, pods * chips, size)) * rng.gamma(1, size=(steps, 1, size))
    given = given.astype(np.float32)
    mesh = mesh_of(pods, chips)

    def one(rows, sent, summed):
        piece = jax.lax.psum_scatter(rows[0], ICI, tiled=True)
        found, left = compressed_sum(piece, RoundingResiduals(sent[0], summed[0]), pods)
        found = jax.lax.all_gather(found, ICI, tiled=True)
        return found[None], left.sent[None], left.summed[None]

    step = on_devices(one, mesh, outs=(EVERY, EVERY, EVERY))
    piece = size // chips
    sent = np.zeros((pods * chips, piece), np.float32)
    summed = np.zeros((pods * chips, piece // pods), np.float32)
    total = np.zeros(size)
    for values in given:
        found, sent, summed = step(values, sent, summed)
        found = np.asarray(found)
        assert (found == found[0]).all()  # all devices got the same
        total += found[0].astype(np.float64)
    # What is still carried, put where it belongs: chip by chip, and pod by pod within a chip.
    carried = np.asarray(sent, np.float64).reshape(pods, chips, piece).sum(0)
    of_sum = np.asarray(summed, np.float64).reshape(pods, chips, -1).transpose(1, 0, 2)
    carried = (carried + of_sum.reshape(chips, piece)).reshape(-1)
    truth = given.astype(np.float64).sum((0, 1))
    assert np.abs(total + carried - truth).max() <= 1e-4 * np.abs(given).sum((0, 1)).max()
    one_step = given[0].astype(np.float64).sum(0)
    assert np.abs(total - truth).max() < 0.2 * np.abs(one_step).max()


def test_rounded_sums_send_a_quarter_of_the_bytes():
    def one(rows):
        piece = jax.lax.psum_scatter(rows[0], ICI, tiled=True)
        none = RoundingResiduals.zeros(piece.size, 2)
        return compressed_sum(piece, none, 2)[0][None]

    text = on_devices(one, mesh_of(2, 4)).lower(jnp.zeros((8, 8 * BLOCK))).as_text()
    sent = [line for line in text.splitlines() if "all_to_all" in line and "i8" in line]
    assert sent
    assert any("all_gather" in line and "i8" in line for line in text.splitlines())


@settings(max_examples=60, deadline=None)
@given(st.lists(st.sampled_from(["a-x-1", "a-x-2", "a-y-1", "b-z-1"]), min_size=1, max_size=9))
def test_neighbours_are_of_one_region(zones):
    order = neighbourly_order(zones)
    assert sorted(order) == list(range(len(zones)))
    regions = [zones[pod].rpartition("-")[0] for pod in order]
    assert len(list(itertools.groupby(regions))) == len(set(regions))

"""What the real TPU compiler makes of sums over two slices, and how much crosses between them."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from tpukit.compiler import compile_for
from tpukit.compiler.hlo.collectives import find_collective
from tpukit.compiler.timeline.network import SliceExchange
from tpukit.pods.multipod.sums import (
    DCN,
    ICI,
    AllReduceStrategy,
    PodTopology,
    RoundingResiduals,
    compressed_sum,
    sum_over_devices,
)

pytestmark = [pytest.mark.libtpu, pytest.mark.xdist_group("libtpu")]
NUMBERS = 2**24
EVERY = PartitionSpec((DCN, ICI))
FIRST, SECOND = tuple(range(8)), tuple(range(8, 16))


def compiled(strategy, topology=PodTopology.MESH, *, compress=False):
    mesh = AbstractMesh((2, 8), (DCN, ICI), axis_types=(AxisType.Auto,) * 2)
    values = jax.ShapeDtypeStruct((16, NUMBERS), jnp.float32, sharding=NamedSharding(mesh, EVERY))

    def add_up(rows):
        if compress:
            piece = jax.lax.psum_scatter(rows[0], ICI, tiled=True)
            piece, _ = compressed_sum(piece, RoundingResiduals.zeros(piece.size, 2), 2)
            return jax.lax.all_gather(piece, ICI, tiled=True)[None]
        return sum_over_devices(
            rows[0], strategy=strategy, topology=topology, pods=2, chips=8, order=(0, 1)
        )[None]

    mapped = jax.shard_map(add_up, mesh=mesh, in_specs=EVERY, out_specs=EVERY, check_vma=False)
    return compile_for(mapped, "2xv6e-8", values, dcn_mesh_shape=(2, 1), until="schedule")


def instructions(step):
    return [one for computation in step.module.computations.values() for one in computation]


def between_slices(step):
    return [SliceExchange.of(one) for one in instructions(step) if one.opcode == "send"]


def test_the_hierarchical_sum_crosses_between_slices_once():
    step = compiled(AllReduceStrategy.HIERARCHICAL)
    (exchange,) = between_slices(step)
    assert (exchange.kind, exchange.slices) == ("ALL_REDUCE", 2)
    # Each device sends its eighth of the data, and nothing else goes between the slices.
    assert exchange.sent_bytes == 4 * NUMBERS // 8
    within = {
        found.kind: set(found.groups)
        for one in step.module.entry
        if (found := find_collective(one, step.module.entry, step.module)) is not None
    }
    # On eight chips the compiler reduces and scatters by an all-reduce whose result is cut.
    assert set(within) == {"all-reduce", "all-gather"}
    assert all(groups in ({FIRST}, {FIRST, SECOND}) for groups in within.values())


@pytest.mark.slow
def test_a_ring_through_all_devices_sends_as_often_as_there_are_devices():
    step = compiled(AllReduceStrategy.RING)
    sent = between_slices(step)
    assert len(sent) == 30  # 15 rounds to reduce, 15 to gather
    assert step.predict().step_time_s > compiled(AllReduceStrategy.FLAT).predict().step_time_s


def test_rounding_to_eight_bits_cuts_what_crosses_to_a_quarter():
    plain = sum(one.wire_bytes for one in between_slices(compiled(AllReduceStrategy.HIERARCHICAL)))
    small = between_slices(compiled(AllReduceStrategy.HIERARCHICAL, compress=True))
    assert {one.kind for one in small} == {"ALL_TO_ALL", "ALL_GATHER"}
    assert sum(one.wire_bytes for one in small) == pytest.approx(plain / 4, rel=0.02)

"""What a host holds to save, restore and export, against the pieces that jax and Orbax name."""

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from orbax.checkpoint._src.serialization import replica_slices

from tpukit.step.host_memory import (
    READ_AT_ONCE_BYTES,
    WORTH_CUTTING_BYTES,
    HostShare,
    StoredArray,
)

MIB = 2**20
SPECS = (P(), P("x"), P("y"), P("x", "y"), P(None, ("x", "y")), P(("x", "y")))


def arrays_on(specs, rows):
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    shape = (rows, 1024)
    values = np.zeros(shape, np.float32)
    return [jax.device_put(values, NamedSharding(mesh, spec)) for spec in specs]


def stored(array):
    pieces = {str(index) for index in array.sharding.devices_indices_map(array.shape).values()}
    return StoredArray(array.nbytes, array.sharding.num_devices // len(pieces))


def written_by(arrays):
    """Bytes that Orbax makes each device write."""
    found = dict.fromkeys(jax.devices()[:4], 0)
    for array in arrays:
        pieces = replica_slices.get_replica_slices(
            array,
            replica_id=0,
            use_replica_parallel=True,
            min_slice_bytes_for_replica_parallel=WORTH_CUTTING_BYTES,
        )
        for piece in pieces.replica_slices:
            found[piece.unsliced_data.device] += piece.data().nbytes
    return list(found.values())


@pytest.mark.parametrize("rows", [8, 4096, 32768])
def test_a_host_copies_what_orbax_makes_it_write(rows):
    """Small replicated arrays are one device's to write, large ones are cut among all."""
    arrays = arrays_on(SPECS, rows)
    written = written_by(arrays)
    state = tuple(stored(array) for array in arrays)
    assert HostShare(state, devices=4, hosts=1).saved_bytes == sum(written)
    most = max(sum(written[:2]), sum(written[2:]))
    of_two = HostShare(state, devices=4, hosts=2).saved_bytes
    assert most <= of_two <= 1.5 * most


def test_a_host_reads_each_piece_of_its_devices_once():
    arrays = arrays_on(SPECS, 64)
    state = tuple(stored(array) for array in arrays)
    whole = sum(array.n_bytes for array in state)
    assert HostShare(state, devices=4, hosts=1).restored_bytes == whole
    # Of two hosts, each with one row of the mesh, the one that holds the more.
    held = [sum(_pieces(array, row) for array in arrays) for row in (slice(0, 2), slice(2, 4))]
    shared = HostShare(state, devices=4, hosts=2).restored_bytes
    assert max(held) <= shared <= whole


def _pieces(array, row):
    """Bytes of the different pieces that those devices hold."""
    of = set(jax.devices()[row])
    pieces = {
        str(one.index): one.data.nbytes for one in array.addressable_shards if one.device in of
    }
    return sum(pieces.values())


@given(
    st.lists(st.tuples(st.integers(1, 2**36), st.sampled_from([1, 2, 4, 8])), min_size=1),
    st.sampled_from([1, 2, 4, 8]),
)
def test_no_host_holds_more_than_the_state_and_all_together_hold_it(sizes, hosts):
    state = tuple(StoredArray(size, copies, True) for size, copies in sizes)
    share, whole = HostShare(state, devices=8, hosts=hosts), sum(size for size, _ in sizes)
    for held in (share.saved_bytes, share.restored_bytes):
        assert held <= whole + len(sizes)
        assert (held + 1) * hosts >= whole
    assert share.under_way_bytes() <= max(READ_AT_ONCE_BYTES, max(sizes)[0] + 1)
    assert share.exporting_bytes(10**9) <= 2 * max(sizes)[0] + 10**9


def test_an_export_needs_no_more_for_more_layers():
    layers = [StoredArray(100 * MIB, 1, True)] * 500
    moments = [StoredArray(100 * MIB, 1, False)] * 1000
    share = HostShare((*layers, *moments), devices=8, hosts=1)
    assert share.exporting_bytes(5 * 10**9) == 200 * MIB + 5 * 10**9

"""Sequences in a ring's order: the same tokens, targets and places, and the same loss."""

import jax
import numpy as np
import pytest

from tpukit.models.loss import next_token_loss
from tpukit.models.presets import get_preset
from tpukit.parallel.mesh.mesh import create_mesh
from tpukit.step.placement import in_ring_order
from tpukit.step.workload import Workload
from tpukit.training.evaluation import jit_eval_step

TINY = get_preset("tiny", n_layers=2, d_model=32, d_ff=64, head_dim=8, vocab_size=64)


@pytest.fixture(scope="module")
def mesh():
    return create_mesh(mesh_shape=(2, 4), axis_names=("fsdp", "context"))


def on_a_ring(model=TINY, length=32, **options):
    return Workload(model, batch_size=4, sequence_length=length, strategy="fsdp+context", **options)


def test_every_entry_moves_alike_and_places_say_where_from():
    batch = on_a_ring().example_batch() | {"weight_of_example": np.arange(4.0)}
    ordered = in_ring_order(batch, 4)
    places = np.asarray(ordered["positions"][0])
    assert sorted(places) == list(range(32))
    assert list(places[:8]) == [0, 1, 2, 3, 28, 29, 30, 31]  # an early and a late piece
    for name in ("inputs", "targets"):
        np.testing.assert_array_equal(ordered[name], np.asarray(batch[name])[:, places])
    np.testing.assert_array_equal(ordered["weight_of_example"], batch["weight_of_example"])


def test_positions_that_are_given_are_kept():
    batch = on_a_ring().example_batch()
    given = np.tile(np.arange(32) % 10, (4, 1))  # documents of ten tokens
    ordered = in_ring_order({**batch, "positions": given}, 4)
    places = np.asarray(in_ring_order(batch, 4)["positions"][0])
    np.testing.assert_array_equal(ordered["positions"], given[:, places])


@pytest.mark.parametrize(
    ("work", "shards"),
    [
        pytest.param(on_a_ring(), 4, id="transformer"),
        pytest.param(on_a_ring(length=36), 1, id="uneven"),
        pytest.param(on_a_ring(TINY.replace(sliding_window=5)), 4, id="window"),
        pytest.param(on_a_ring(TINY.replace(sliding_window=6)), 1, id="far-window"),
        pytest.param(
            on_a_ring(loss=lambda out, batch: next_token_loss(out, batch["targets"])), 1, id="loss"
        ),
    ],
)
def test_only_what_does_not_depend_on_the_order_is_ordered(mesh, work, shards):
    execution = work.execution_on(mesh)
    assert execution.zigzag == shards
    assert execution.attention.keywords["layout"] == ("zigzag" if shards > 1 else "contiguous")


@pytest.mark.slow
def test_evaluation_on_a_ring_is_that_of_one_device(mesh):
    work = on_a_ring()
    batch = work.example_batch()
    state = work.init_on(mesh, jax.random.key(0))
    found = jit_eval_step(work, mesh)(state.params, {}, work.put_batch(mesh, batch))
    alone = create_mesh(mesh_shape=(1,), axis_names=("fsdp",), devices=jax.devices()[:1])
    single = work.replace(strategy="fsdp")
    params = jax.device_get(state.params)
    wanted = jit_eval_step(single, alone)(params, {}, single.put_batch(alone, batch))
    np.testing.assert_allclose(found.total, wanted.total, rtol=1e-5)
    assert float(found.weight) == float(wanted.weight)

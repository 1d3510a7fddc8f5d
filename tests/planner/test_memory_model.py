"""The memory model: exact where it counts, falling where a step is split, one value or many."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpukit.kernels.ops.cross_entropy import chunked
from tpukit.models import get_preset
from tpukit.planner.cost import memory_model
from tpukit.planner.cost.memory_model import MeshRoles, estimate_memory_bytes
from tpukit.planner.cost.model_shape import shape_of
from tpukit.planner.search.candidates import REMATS
from tpukit.step import OptimizerSpec, Workload, build_optimizer
from tpukit.step.optimizer.spec import state_bytes_per_parameter

MODELS = ("llama3.2-1b", "llama3.1-8b", "gpt3-175b", "mixtral-8x7b", "tiny", "tiny-moe")
# Totals of the compiler's buffer assignment (benchmarks/memory_estimate.py, libtpu 0.0.42.1).
COMPILED_GIB = (
    ("llama3.2-1b", "v6e", {"fsdp": 8}, 4, 2048, "full", 4.95),
    ("llama3.2-1b", "v6e", {"fsdp": 8}, 1, 2048, "none", 8.28),
    ("llama3.1-8b", "v5p", {"fsdp": 8}, 2, 4096, "minimal", 35.90),
    ("llama3.1-8b", "v5p", {"fsdp": 8}, 4, 8192, "save=attention", 35.37),
    ("llama3.1-8b", "v6e", {"fsdp": 8, "tensor": 2}, 2, 8192, "full", 12.62),
    ("llama3.1-70b", "v6e", {"fsdp": 64}, 1, 4096, "full", 25.23),
    ("mixtral-8x7b", "v6e", {"fsdp": 64}, 1, 4096, "full", 15.85),
)


def estimate(model, mesh=None, *, batch=1, length=2048, **options):
    return estimate_memory_bytes(
        shape_of(get_preset(model)),
        MeshRoles(**(mesh or {})),
        per_device_batch=batch,
        sequence_length=length,
        **options,
    )


def tree_bytes(tree):
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


@pytest.mark.parametrize("model", ["tiny-moe", "small-125m", "llama3.1-8b"])
def test_weights_and_optimizer_are_those_of_the_real_state(model):
    shapes = get_preset(model).parameter_shapes().values()
    for spec in (OptimizerSpec(), OptimizerSpec(moment_dtype="int8"), OptimizerSpec(name="lion")):
        work = Workload(
            model, batch_size=1, sequence_length=128, optimizer=build_optimizer(spec, 1e-3)
        )
        state = work.state_shapes()
        split = estimate(model, optimizer_bytes=state_bytes_per_parameter(spec, shapes))
        assert split.weights == tree_bytes(state.params)
        counters = 64  # steps taken, which are no moments
        assert split.optimizer == pytest.approx(tree_bytes(state.opt_state), abs=counters)


@pytest.mark.parametrize(("model", "chip", "mesh", "batch", "length", "remat", "gib"), COMPILED_GIB)
def test_the_total_is_near_the_compilers(model, chip, mesh, batch, length, remat, gib):
    copy = memory_model.rounds_first(chip)
    split = estimate(model, mesh, batch=batch, length=length, remat=remat, whole_copy=copy)
    total = split.total
    assert total / 2**30 == pytest.approx(gib, rel=0.07)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(MODELS),
    st.sampled_from(REMATS),
    st.sampled_from(("data", "fsdp", "tensor", "expert", "context")),
    st.fixed_dictionaries({role: st.sampled_from((1, 2, 8)) for role in ("fsdp", "tensor")}),
    st.sampled_from((1, 2, 8)),
    st.sampled_from((512, 2048, 8192)),
    st.sampled_from((1, 4)),
)
def test_more_chips_for_the_same_step_never_take_more_each(
    model, remat, role, mesh, batch, length, microbatches
):
    options = {"length": length, "remat": remat, "microbatches": microbatches}
    few = estimate(model, mesh, batch=batch, **options)
    more = {**mesh, role: 2 * mesh.get(role, 1)}
    ways = MeshRoles(**more).batch_ways / MeshRoles(**mesh).batch_ways
    assert estimate(model, more, batch=batch / ways, **options).total <= few.total


@given(st.sampled_from(MODELS), st.sampled_from((1, 4)), st.sampled_from((512, 4096)))
def test_the_more_is_computed_again_the_less_is_kept(model, batch, length):
    kept = [estimate(model, batch=batch, length=length, remat=remat) for remat in REMATS]
    totals = [split.total for split in kept]
    assert totals == sorted(totals, reverse=True)
    assert kept[-1].host == kept[-2].activations


def test_arrays_of_candidates_give_each_its_own_value():
    fsdp, batch = np.asarray([[1], [8], [64]]), np.asarray([1, 2, 16, 64])
    together = estimate("llama3.1-8b", {"fsdp": fsdp}, batch=batch)
    assert together.total.shape == (3, 4)
    for row, devices in enumerate(fsdp[:, 0]):
        for column, examples in enumerate(batch):
            alone = estimate("llama3.1-8b", {"fsdp": int(devices)}, batch=int(examples))
            for name, value in alone.to_dict().items():
                amount = np.broadcast_to(getattr(together, name), (3, 4))[row, column]
                assert amount == value


def test_longer_segments_keep_less_and_work_on_more():
    one, four = (estimate("llama3.1-8b", length=8192, remat_every=n) for n in (1, 4))
    assert four.activations == one.activations / 4
    assert four.temporaries > one.temporaries


def test_microbatches_trade_activations_for_a_sum_of_gradients():
    whole, cut = (estimate("llama3.1-8b", {"fsdp": 8}, batch=8, microbatches=n) for n in (1, 4))
    assert cut.activations == whole.activations / 4
    piece = estimate("llama3.1-8b", {"fsdp": 8}, batch=2)
    assert cut.gradients == piece.gradients + piece.weights


def test_the_loss_is_cut_as_the_kernel_cuts_it():
    assert memory_model.LOGITS_BYTES == chunked.LOGITS_BYTES
    assert memory_model.MIN_CHUNK_TOKENS == chunked.MIN_TOKENS

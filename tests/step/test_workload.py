"""A workload knows the place of every leaf, lowers with no memory, and refuses what cannot run."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

from tpukit.errors import ShardingError, TPUModelError
from tpukit.models.presets import get_preset
from tpukit.parallel.mesh.mesh import abstract_mesh, create_mesh
from tpukit.step.workload import Workload

TINY = Workload("tiny", batch_size=8, sequence_length=16)


def bigram(**options):
    """A language model of one table: the step around it is what is tested, and compiles at once."""

    def init(rng):
        return {"table": jax.random.normal(rng, (256, 256))}

    def apply(params, batch):
        return params["table"][batch["inputs"] % 256]

    settings = {"batch_size": 8, "sequence_length": 16, "optimizer": optax.sgd(0.5)}
    return Workload((init, apply), **{**settings, **options})


def test_shapes_take_no_memory():
    # A 405B model's state is 4.9 TB: were any of it allocated, this machine would know.
    work = Workload("llama3.1-405b", batch_size=256, sequence_length=8192, strategy="fsdp")
    shapes = work.state_shapes()
    params = sum(leaf.size for leaf in jax.tree.leaves(shapes.params))
    assert params == 405_853_388_800
    state, batch = work.abstract_args(abstract_mesh(mesh_shape=(256,), axis_names=("fsdp",)))
    assert batch["inputs"].sharding.spec == P(("fsdp",), None)
    held = sum(
        np.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(state)
    )
    assert held == pytest.approx(3 * 4 * params / 256, rel=0.005), "params and two moments, split"


def test_optimizer_state_lies_where_its_parameter_lies():
    mesh = create_mesh(mesh_shape=(4, 2), axis_names=("fsdp", "model"))
    places = TINY.replace(strategy="fsdp+megatron").shardings(mesh).state
    moments = places.opt_state[1][0]  # after clipping, which has no state
    assert moments.mu == places.params == moments.nu
    kernel = places.params["layers"]["self_attention"]["q_proj"]["kernel"]
    assert kernel.spec == P(None, "fsdp", "model")
    assert moments.count.is_fully_replicated


@pytest.mark.slow
@pytest.mark.parametrize(
    ("preset", "strategy", "sizes", "collectives"),
    [
        ("tiny", "fsdp", {"fsdp": 16}, ("all_gather", "reduce_scatter")),
        ("tiny", "fsdp+context", {"fsdp": 4, "context": 4}, ("collective_permute",)),
        ("tiny", "pipeline+fsdp", {"stage": 2, "fsdp": 4}, ("collective_permute",)),
        ("tiny-moe", "expert", {"expert": 4}, ("all_to_all",)),
    ],
)
def test_steps_lower_for_tpu_on_meshes_nobody_has(preset, strategy, sizes, collectives):
    mesh = abstract_mesh(mesh_shape=tuple(sizes.values()), axis_names=tuple(sizes))
    work = Workload(
        preset, batch_size=32, sequence_length=32, strategy=strategy, microbatches=2, remat="full"
    )
    traced = work.jit_train_step(mesh).trace(*work.abstract_args(mesh))
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert f"num_partitions = {mesh.size}" in text
    assert "tf.aliasing_output" in text or "jax.buffer_donor" in text, "the state is donated"
    # Collectives of automatic axes come with partitioning; manual ones are already there.
    if strategy != "fsdp":
        assert all(f"stablehlo.{name}" in text for name in collectives)


def test_init_on_a_mesh_makes_the_same_state_in_shards():
    mesh = create_mesh(mesh_shape=(8,), axis_names=("fsdp",))
    state = bigram().init_on(mesh, jax.random.key(3))
    table = state.params["table"]
    np.testing.assert_array_equal(table, bigram().init(jax.random.key(3)).params["table"])
    assert table.addressable_shards[0].data.size == table.size // 8


def test_microbatches_add_up_to_the_whole_batch_even_when_masks_differ():
    work = bigram()
    state = work.init(jax.random.key(0))
    batch = work.example_batch()
    masked = jnp.arange(16)[None] < jnp.asarray([1, 16, 2, 16, 3, 16, 4, 5])[:, None]
    batch["targets"] = jnp.where(masked, batch["targets"], -1)
    whole, metrics = jax.jit(work.train_step)(state, batch)
    pieces, same = jax.jit(work.replace(microbatches=4).train_step)(state, batch)
    assert float(metrics["weight"]) == float(same["weight"]) == 63
    np.testing.assert_allclose(metrics["loss"], same["loss"], rtol=1e-6)
    np.testing.assert_allclose(whole.params["table"], pieces.params["table"], atol=1e-6)
    assert not np.allclose(whole.params["table"], state.params["table"], atol=1e-4)


def test_a_fully_masked_batch_teaches_nothing():
    work = bigram()
    state = work.init(jax.random.key(0))
    batch = {**work.example_batch(), "targets": jnp.full((8, 16), -1)}
    after, metrics = jax.jit(work.train_step)(state, batch)
    assert float(metrics["loss"]) == 0
    np.testing.assert_array_equal(after.params["table"], state.params["table"])


def test_it_describes_itself():
    described = TINY.replace(remat="full every=2").to_dict()
    assert described["model"] == "tiny"
    assert described["parameters"] == get_preset("tiny").parameter_count().total
    assert described["remat"] == "full every=2"
    assert TINY.tokens_per_step == 128
    assert TINY.__rich__().row_count == len(described)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": None}, "a workload needs batch_size and sequence_length"),
        ({"microbatches": 3}, "microbatches=3 does not divide batch_size=8"),
        ({"sequence_length": 500}, "sequence_length=500 is longer than the limit of 'tiny'"),
        ({"batch": {}}, r"batch=\{\} has no entries"),
        ({"remat": "ful"}, "remat policy 'ful'"),
        (
            {"batch": {"x": jax.ShapeDtypeStruct((), jnp.int32)}},
            "'x' has shape .* expected the batch dimension",
        ),
    ],
)
def test_errors_teach(changes, message):
    with pytest.raises(TPUModelError, match=message):
        TINY.replace(**changes)


def test_a_batch_entry_without_its_batch_dimension_is_named():
    batch = {name: jax.ShapeDtypeStruct((size,), jnp.int32) for name, size in (("a", 8), ("b", 4))}
    with pytest.raises(TPUModelError, match=r"'b' has shape \(4,\).*dimension 8"):
        TINY.replace(batch=batch)


@pytest.mark.parametrize(
    ("strategy", "sizes", "changes", "message"),
    [
        ("megatron", {"model": 8}, {}, "heads=4 does not divide over model=8"),
        ("fsdp", {"fsdp": 16}, {}, "batch_size=8 cannot be split over fsdp = 16 devices"),
        (
            "fsdp",
            {"fsdp": 4},
            {"microbatches": 4},
            "batch_size=8 in 4 micro-batches cannot be split over fsdp = 4.*multiple of 16",
        ),
        ("context", {"context": 3}, {}, "sequence_length=16 cannot be split over context = 3"),
        ("pipeline", {"stage": 4}, {}, "2 layers|2 cannot|divide"),
        ("tensor", {"model": 2}, {}, "Unknown sharding strategy 'tensor'"),
        ("megatron", {"data": 2}, {}, "needs a mesh axis called 'model'"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(strategy, sizes, changes, message):
    mesh = abstract_mesh(mesh_shape=tuple(sizes.values()), axis_names=tuple(sizes))
    with pytest.raises(ShardingError, match=message):
        TINY.replace(strategy=strategy, **changes).shardings(mesh)


def test_key_heads_too_few_to_split_stay_whole():
    mesh = abstract_mesh(mesh_shape=(4,), axis_names=("model",))
    config = get_preset("tiny", n_heads=4, n_kv_heads=2)
    work = Workload(config, batch_size=8, sequence_length=16, strategy="megatron")
    attention = work.layout(mesh).specs["layers"]["self_attention"]
    split = {name: "model" in attention[name]["kernel"] for name in attention}
    assert split == {"q_proj": True, "k_proj": False, "v_proj": False, "o_proj": True}


def test_a_pipeline_keeps_patterns_whole():
    config = get_preset(
        "tiny",
        n_layers=4,
        layer_kinds={"local": {"sliding_window": 4}, "global": {}},
        layer_pattern="3 local, global",
    )
    work = Workload(config, batch_size=4, sequence_length=16, strategy="pipeline")
    mesh = abstract_mesh(mesh_shape=(2,), axis_names=("stage",))
    with pytest.raises(ShardingError, match="'3 local, global', but 2 stages would not all have"):
        work.jit_train_step(mesh).trace(*work.abstract_args(mesh))


def test_a_pipeline_of_somebody_elses_model_is_refused():
    def init(rng):
        return {"layers": {"kernel": jnp.zeros((2, 4, 4)), "other": jnp.zeros((2, 4))}}

    batch = {"x": jax.ShapeDtypeStruct((4, 4), jnp.float32)}
    work = Workload((init, lambda p, b: jnp.sum(b["x"])), batch=batch, strategy="pipeline")
    mesh = abstract_mesh(mesh_shape=(2,), axis_names=("stage",))
    with pytest.raises(TPUModelError, match="needs the layers of a reference transformer"):
        work.jit_train_step(mesh).trace(*work.abstract_args(mesh))


def test_the_norm_of_gradients_may_be_left_unmeasured():
    work = Workload("tiny", batch_size=4, sequence_length=32)
    state, batch = work.init(jax.random.key(0)), work.example_batch()
    measured = jax.jit(work.train_step)(state, batch)
    unmeasured = jax.jit(work.replace(grad_norm=False).train_step)(state, batch)
    assert set(measured[1]) - set(unmeasured[1]) == {"grad_norm"}
    leaves = [jax.tree.leaves(after.params) for after, _ in (measured, unmeasured)]
    for one, other in zip(*leaves, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)

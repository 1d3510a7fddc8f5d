"""A sharded model is the model it was: flax nnx, flax linen, equinox and plain functions."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from tpukit.errors import ShardingError
from tpukit.parallel import (
    abstract_mesh,
    create_mesh,
    get_sharding_spec,
    make_layout,
    shard_model,
    unpad,
    validate_sharding,
)

X = jnp.linspace(-1.0, 1.0, 8 * 64).reshape(8, 64)
STRATEGIES = ["fsdp", "megatron", "fsdp+megatron"]


@pytest.fixture(scope="module")
def mesh():
    return create_mesh(mesh_shape=(4, 2), axis_names=("data", "model"))


class NnxMlp(nnx.Module):
    def __init__(self, rngs, mlp=128):
        self.up_proj = nnx.Linear(64, mlp, rngs=rngs)
        self.down_proj = nnx.Linear(mlp, 64, rngs=rngs)
        self.up_tied = self.up_proj.kernel  # one variable under two names

    def __call__(self, x):
        return (
            self.down_proj(nnx.silu(self.up_proj(x))) + x @ self.up_tied[...] @ self.up_tied[...].T
        )


class LinenMlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        init = nn.with_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        x = nn.Dense(128, kernel_init=init, name="a")(x)
        init = nn.with_partitioning(nn.initializers.lecun_normal(), ("model", "data"))
        return nn.Dense(64, kernel_init=init, name="b")(nn.relu(x))


def make_nnx():
    return NnxMlp(nnx.Rngs(0)), nnx.jit(lambda model: model(X))


def make_linen():
    module = LinenMlp()
    return module.init(jax.random.key(0), X), jax.jit(lambda variables: module.apply(variables, X))


def make_equinox():
    model = eqx.nn.MLP(64, 64, 128, 2, key=jax.random.key(0))
    return model, eqx.filter_jit(lambda mlp: jax.vmap(mlp)(X))


def make_plain():
    up, down = jnp.asarray(np.random.default_rng(0).normal(size=(2, 64, 128)) / 8, jnp.float32)
    params = {"up": {"kernel": up}, "down": {"kernel": down.T}, "step": jnp.int32(3)}
    return params, jax.jit(lambda p: jnp.tanh(X @ p["up"]["kernel"]) @ p["down"]["kernel"])


KINDS = {"nnx": make_nnx, "linen": make_linen, "equinox": make_equinox, "plain": make_plain}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_kind_of_object_computes_the_same(mesh, kind, strategy):
    model, apply = KINDS[kind]()
    sharded = shard_model(model, mesh, strategy)
    assert type(sharded) is type(model)
    assert jax.tree.structure(sharded) == jax.tree.structure(model)
    for before, after in zip(jax.tree.leaves(model), jax.tree.leaves(sharded), strict=True):
        if isinstance(before, jax.Array):
            np.testing.assert_array_equal(before, after)
            assert after.sharding.device_set == set(mesh.devices.flat)
    np.testing.assert_allclose(apply(sharded), apply(model), rtol=1e-5, atol=1e-5)
    validate_sharding(sharded, mesh, strategy)


def test_shared_variables_stay_shared(mesh):
    sharded = shard_model(make_nnx()[0], mesh, "fsdp+megatron")
    assert sharded.up_tied is sharded.up_proj.kernel
    assert sharded.up_tied[...].sharding.spec == P("data", "model")


def test_labels_of_the_model_win_over_its_names(mesh):
    specs = make_layout(make_linen()[0], mesh, "fsdp+megatron").specs["params"]
    assert specs["a"]["kernel"].value == P("data", "model")  # by the meaning of (embed, mlp)
    assert specs["b"]["kernel"].value == P("model", "data")  # by the mesh axes it named
    labelled = {"odd": nnx.Param(jnp.zeros((64, 64)), dims=("mlp", "embed"))}
    assert make_layout(labelled, mesh, "megatron").specs["odd"].get_value() == P("model")


def test_a_label_for_one_layer_fits_its_stack():
    mesh = abstract_mesh(mesh_shape=(2, 2), axis_names=("stage", "model"))
    tree = {"odd": nnx.Param(jnp.zeros((4, 64, 64)), dims=("embed", "mlp"))}
    specs = make_layout(tree, mesh, "pipeline+megatron").specs
    assert specs["odd"].get_value() == P("stage", None, "model")
    named = nnx.Param(jnp.zeros((4, 64, 64)), out_sharding=(None, "model"), eager_sharding=False)
    tree = {"odd": named}
    assert make_layout(tree, mesh, None).specs["odd"].get_value() == P(None, None, "model")


def test_random_keys_and_counters_are_replicated(mesh):
    class Noisy(nnx.Module):
        def __init__(self, rngs):
            self.up_proj = nnx.Linear(64, 128, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

    sharded = shard_model(Noisy(nnx.Rngs(0)), mesh, "fsdp")
    assert sharded.dropout.rngs.key[...].sharding.is_fully_replicated


def test_quantized_weights_are_split_like_the_weights_they_stand_for(mesh):
    params = {"up_proj": {"kernel": jnp.zeros((64, 128), jnp.int8)}, "steps": jnp.zeros(64, int)}
    specs = make_layout(params, mesh, "fsdp+megatron").specs
    assert specs == {"up_proj": {"kernel": P("data", "model")}, "steps": P()}


def test_shapes_get_their_sharding_attached():
    mesh = abstract_mesh(mesh_shape=(64, 4), axis_names=("data", "model"))
    model = nnx.eval_shape(lambda: NnxMlp(nnx.Rngs(0)))
    sharded = shard_model(model, mesh, "fsdp+megatron")
    kernel = sharded.up_proj.kernel.get_value()
    assert isinstance(kernel, jax.ShapeDtypeStruct)
    assert kernel.sharding.spec == P("data", "model")
    with pytest.raises(ShardingError, match="abstract mesh, which has no devices"):
        shard_model(make_plain()[0], mesh, "fsdp")


def test_gradients_and_their_reduction_are_the_same(mesh):
    params, apply = make_plain()
    del params["step"]
    gradient = jax.grad(lambda p: jnp.mean(apply(p) ** 2))
    expected = jax.jit(gradient)(params)
    layout = make_layout(params, mesh, "fsdp+megatron")
    step = jax.jit(gradient, out_shardings=layout.shardings)
    found = step(shard_model(params, mesh, "fsdp+megatron"))
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), found, expected
    )
    validate_sharding(found, mesh, layout)


def test_padding_changes_no_output_and_comes_off_exactly():
    mesh = create_mesh(mesh_shape=(2, 4), axis_names=("data", "model"))
    model = NnxMlp(nnx.Rngs(0), mlp=130)
    with pytest.raises(ShardingError, match=r"mlp=130 does not divide over model=4.*pad=True"):
        shard_model(model, mesh, "megatron")
    layout = make_layout(model, mesh, "megatron", pad=True)
    padded = shard_model(model, mesh, "megatron", pad=True)
    assert padded.up_proj.kernel.shape == (64, 132)
    assert padded.up_proj.bias.shape == (132,)
    apply = nnx.jit(lambda mlp: mlp(X))
    np.testing.assert_allclose(apply(padded), apply(model), rtol=1e-5, atol=1e-5)
    restored = unpad(padded, layout)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(restored), nnx.state(model))


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((), P()),
        ((5,), P("data")),
        ((5, 6), P("data", "model")),
        ((5, 6, 7), P("data", None, "model")),
        ((5, 6, 7, 8), P("data", None, None, "model")),
    ],
)
def test_the_default_split_of_a_shape(shape, spec):
    assert get_sharding_spec(shape) == spec


def test_the_default_split_takes_other_axes():
    assert get_sharding_spec((4, 4), ("fsdp",)) == P("fsdp", None)
    assert get_sharding_spec((4, 4), ("a", "b", "c")) == P("a", "b")
    assert get_sharding_spec((4, 4), ()) == P(None, None)

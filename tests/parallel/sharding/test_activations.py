"""Activations go where the strategy in force says, and nowhere when none is."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tpukit.errors import ShardingError
from tpukit.parallel import abstract_mesh, activation_rules, constrain, create_mesh
from tpukit.parallel.sharding.activations import ActivationRules, current_rules

X = jnp.ones((8, 4, 16))


@pytest.fixture(scope="module")
def mesh():
    return create_mesh(mesh_shape=(2, 2, 2), axis_names=("data", "expert", "model"))


@jax.jit
def block(x):
    return constrain(x, "batch", "sequence", "embed") * 2


def test_no_rules_no_constraint():
    assert current_rules() is None
    assert constrain(X, "batch", None, "embed") is X


def test_a_function_jitted_once_obeys_each_strategy(mesh):
    with activation_rules(mesh, "megatron"):
        assert block(X).sharding.spec == P(("data", "expert"))
    with activation_rules(mesh, "megatron+sequence"):
        assert block(X).sharding.spec == P(("data", "expert"), "model")
    assert block(X).sharding.device_set == {jax.devices()[0]}


@pytest.mark.parametrize(
    ("strategy", "names", "shape", "spec"),
    [
        (
            "megatron",
            "batch sequence heads head_dim",
            (8, 4, 4, 8),
            P(("data", "expert"), None, "model"),
        ),
        ("megatron", "batch sequence mlp", (8, 4, 16), P(("data", "expert"), None, "model")),
        ("megatron", "batch sequence vocab", (8, 4, 16), P(("data", "expert"), None, "model")),
        # Inside a block the hidden units take the tensor axis back from the sequence.
        (
            "megatron+sequence",
            "batch sequence mlp",
            (8, 4, 16),
            P(("data", "expert"), None, "model"),
        ),
        # Inside an expert layer the experts take their axis back from the batch.
        ("expert", "batch expert capacity embed", (8, 4, 4, 16), P("data", "expert")),
        ("expert+megatron", "expert capacity mlp", (4, 4, 16), P("expert", "data", "model")),
        ("fsdp", "batch sequence heads head_dim", (8, 4, 4, 8), P(("data", "expert"))),
        # What does not divide is left out, axis by axis.
        ("megatron", "batch sequence kv_heads head_dim", (6, 4, 1, 8), P("data")),
        ("megatron", "batch sequence embed", (1, 4, 16), P()),
    ],
)
def test_rules(mesh, strategy, names, shape, spec):
    found = ActivationRules.of(mesh, strategy).spec(tuple(names.split()), shape)
    assert P(*(*spec, *[None] * (len(shape) - len(spec)))) == found


def test_context_splits_the_sequence_before_the_tensor_axis_does():
    mesh = abstract_mesh(mesh_shape=(2, 2, 2), axis_names=("data", "context", "model"))
    rules = ActivationRules.of(mesh, "megatron+sequence+context")
    names = ("batch", "sequence", "embed")
    assert rules.spec(names, (8, 8, 16)) == P("data", ("context", "model"), None)


def test_an_abstract_mesh_is_enough_to_lower():
    mesh = abstract_mesh(mesh_shape=(64, 4), axis_names=("data", "model"))
    x = jax.ShapeDtypeStruct((64, 8, 16), jnp.float32, sharding=NamedSharding(mesh, P("data")))
    with activation_rules(mesh, "megatron+sequence"):
        text = jax.jit(block).trace(x).lower(lowering_platforms=("tpu",)).as_text()
    assert "num_partitions = 256" in text
    assert 'sharding_constraint %arg0 <@mesh, [{"data"}, {"model"}, {}]>' in text


def test_axes_split_by_hand_are_left_alone(mesh):
    def inside(x):
        assert x.shape == (4, 4, 16)
        return constrain(x, "batch", "sequence", "mlp")

    def partly(x):
        return jax.shard_map(
            inside, mesh=mesh, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}
        )(x)

    def wholly(x):
        return jax.shard_map(inside, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(x)

    with activation_rules(mesh, "megatron"):
        assert jax.jit(partly)(X).sharding.spec == P(("data", "expert"), None, "model")
        assert jax.jit(wholly)(X).sharding.spec == P("data")


def test_constraints_pass_gradients_through(mesh):
    def loss(x):
        return (constrain(x, "batch", "sequence", "mlp") ** 2).sum()

    with activation_rules(mesh, "megatron"):
        assert jnp.array_equal(jax.jit(jax.grad(loss))(X), 2 * X)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("batch", "sequnce", "embed"), r"dimension 'sequnce'.*Did you mean 'sequence'"),
        (("batch", "embed"), r"got 2 names .* for an array of shape \(8, 4, 16\)"),
    ],
)
def test_wrong_names_are_refused_with_or_without_rules(names, message):
    with pytest.raises(ShardingError, match=message):
        constrain(X, *names)


def test_a_strategy_needs_its_axis():
    mesh = abstract_mesh(mesh_shape=(8,), axis_names=("data",))
    with (
        pytest.raises(ShardingError, match="'sequence' needs a mesh axis called 'model'"),
        activation_rules(mesh, "sequence"),
    ):
        pass
    assert current_rules() is None

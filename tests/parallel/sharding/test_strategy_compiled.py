"""The real TPU compiler turns each strategy into the collectives it promises."""

import jax
import jax.numpy as jnp
import pytest

from tpukit.compiler import compile_for
from tpukit.compiler.hlo import count_collectives
from tpukit.hardware import Slice
from tpukit.parallel import abstract_mesh, constrain, make_layout

pytestmark = [pytest.mark.libtpu, pytest.mark.xdist_group("libtpu")]

EMBED, MLP, VOCAB, BATCH, SEQUENCE = 256, 1024, 512, 32, 128


def params():
    def shape(*sizes):
        return jax.ShapeDtypeStruct(sizes, jnp.bfloat16)

    return {
        "embed": {"embedding": shape(VOCAB, EMBED)},
        "up_proj": {"kernel": shape(EMBED, MLP)},
        "down_proj": {"kernel": shape(MLP, EMBED)},
    }


def loss(weights, tokens):
    x = constrain(weights["embed"]["embedding"][tokens], "batch", "sequence", "embed")
    hidden = jax.nn.relu(x @ weights["up_proj"]["kernel"])
    hidden = constrain(hidden, "batch", "sequence", "mlp")
    x = x + hidden @ weights["down_proj"]["kernel"]
    x = constrain(x, "batch", "sequence", "embed")
    logits = constrain(x @ weights["embed"]["embedding"].T, "batch", "sequence", "vocab")
    return jnp.mean(jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1))


def compile_strategy(strategy, slice_name, axes, dcn=None):
    target = Slice.parse(slice_name)
    mesh = abstract_mesh(mesh_shape=tuple(axes.values()), axis_names=tuple(axes))
    layout = make_layout(params(), mesh, strategy)
    weights = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        params(),
        layout.shardings,
    )
    tokens = jax.ShapeDtypeStruct((BATCH, SEQUENCE), jnp.int32, sharding=layout.batch_sharding)

    def gradient(weights, tokens):
        found = jax.grad(loss)(weights, tokens)
        return jax.lax.with_sharding_constraint(found, layout.shardings)

    with layout.activation_rules():
        return compile_for(gradient, target, weights, tokens, dcn_mesh_shape=dcn, until="schedule")


# (strategy, slice, mesh, its part across slices, collectives). Each split leaves a device at least
# 64 rows: below that, and where a matrix product can hide it, the compiler prefers an all-reduce
# or a ring of permutes to a reduce-scatter.
CASES = [
    ("fsdp", "v5e-16", {"data": 4, "fsdp": 4}, None, {"all-gather", "reduce-scatter"}),
    (
        "megatron+sequence",
        "v6e-16",
        {"data": 4, "model": 4},
        None,
        {"all-gather", "reduce-scatter"},
    ),
]
MORE_CASES = [
    ("megatron", "v5e-16", {"data": 4, "model": 4}, None, {"all-reduce"}),
    ("data", "v6e-16", {"data": 16}, None, {"all-reduce"}),
    ("fsdp+megatron", "v5p-16", {"fsdp": 4, "model": 2}, None, {"all-gather", "reduce-scatter"}),
    ("fsdp", "2xv6e-16", {"data": 8, "fsdp": 4}, (2, 1), {"all-gather", "reduce-scatter"}),
]
CASES += [pytest.param(*case, marks=pytest.mark.slow) for case in MORE_CASES]


@pytest.mark.parametrize(("strategy", "slice_name", "axes", "dcn", "promised"), CASES)
def test_the_promised_collectives_are_there(strategy, slice_name, axes, dcn, promised):
    pytest.importorskip("libtpu")
    found = count_collectives(compile_strategy(strategy, slice_name, axes, dcn).module)
    assert promised <= set(found), found
    if strategy == "data":
        assert set(found) == {"all-reduce"}
    if dcn is not None:
        assert "dcn-send" in found

"""Layouts: valid on every mesh, for optimizer states too, and honest in their report."""

import io
import logging
import math

import jax
import jax.numpy as jnp
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from rich.console import Console

from tpukit.parallel import abstract_mesh, create_mesh, make_layout, unpad
from tpukit.parallel.sharding.rules import spec_entries
from tpukit.parallel.sharding.strategy import strategy_names
from tpukit.step.int8_adam import scale_by_int8_adam


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def transformer(layers, embed, heads, mlp, vocab, experts):
    return {
        "embed": {"embedding": shape(vocab, embed)},
        "layers": {
            "attention": {
                "q": {"kernel": shape(layers, embed, heads, 16)},
                "k": {"kernel": shape(layers, embed, max(heads // 4, 1), 16)},
                "out": {"kernel": shape(layers, heads, 16, embed)},
            },
            "moe": {
                "router": {"kernel": shape(layers, embed, experts)},
                "experts": {
                    "up": shape(layers, experts, embed, mlp),
                    "down": shape(layers, experts, mlp, embed),
                },
            },
            "norm": {"scale": shape(layers, embed)},
        },
        "lm_head": {"kernel": shape(embed, vocab)},
        "step": shape(dtype=jnp.int32),
    }


SIZES = st.sampled_from([1, 2, 3, 4, 8])


@settings(max_examples=60, deadline=None)
@given(
    axes=st.fixed_dictionaries(
        dict.fromkeys(("stage", "data", "fsdp", "expert", "context", "model"), SIZES)
    ),
    chosen=st.sets(st.sampled_from(strategy_names()), min_size=1),
    factor=st.integers(1, 3),
    width=st.integers(1, 40),
)
def test_every_spec_is_valid_on_every_mesh(axes, chosen, factor, width):
    # The structural dimensions are multiples of their axes (else it is an error, tested
    # elsewhere); the embedding width is anything, and fsdp must cope.
    tree = transformer(
        layers=axes["stage"] * factor,
        embed=width,
        heads=axes["model"] * factor,
        mlp=axes["model"] * 2 * factor,
        vocab=axes["model"] * 5,
        experts=axes["expert"] * factor,
    )
    mesh = abstract_mesh(mesh_shape=tuple(axes.values()), axis_names=tuple(axes))
    layout = make_layout(tree, mesh, "+".join(sorted(chosen)))
    for placement in layout.report.placements:
        entries = spec_entries(placement.spec, len(placement.shape))
        used = [axis for entry in entries for axis in entry]
        assert len(used) == len(set(used))
        ways = [math.prod(axes[axis] for axis in entry) for entry in entries]
        assert all(size % way == 0 for size, way in zip(placement.shape, ways, strict=True))
        # jax itself is the judge of what one device holds.
        shard = NamedSharding(mesh, placement.spec).shard_shape(placement.shape)
        assert placement.bytes_per_device == math.prod(shard) * placement.itemsize
    assert jax.tree.structure(layout.specs) == jax.tree.structure(tree)
    json_data = layout.to_dict()
    assert json_data["bytes_per_device"] <= json_data["bytes_total"]


@pytest.fixture(scope="module")
def layout():
    mesh = create_mesh(mesh_shape=(2, 2, 2), axis_names=("fsdp", "expert", "model"))
    return make_layout(transformer(2, 64, 4, 128, 256, 4), mesh, "fsdp+megatron+expert")


OPTIMIZERS = {
    "adamw": optax.adamw(1e-3),
    "lion": optax.lion(1e-3),
    "chain": optax.chain(
        optax.clip_by_global_norm(1.0), optax.adam(optax.cosine_decay_schedule(1, 9))
    ),
    "multi_steps": optax.MultiSteps(optax.sgd(1e-3, momentum=0.9), 4).gradient_transformation(),
    "masked": optax.masked(
        optax.adam(1e-3), lambda params: jax.tree.map(lambda x: x.ndim > 2, params)
    ),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_states_live_where_their_parameters_live(layout, name):
    params = transformer(2, 64, 4, 128, 256, 4)
    del params["step"]
    state = jax.eval_shape(OPTIMIZERS[name].init, params)
    shardings = layout.for_optimizer_state(state)
    assert jax.tree.structure(shardings) == jax.tree.structure(state)
    specs_by_shape = {one.shape: one.spec for one in layout.report.placements}
    matched = 0
    for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True):
        assert sharding.spec == specs_by_shape.get(leaf.shape, P())
        matched += leaf.ndim > 1
    assert matched >= 5


def test_statistics_of_rows_and_columns_keep_the_axes_of_the_dimensions_they_have():
    mesh = abstract_mesh(mesh_shape=(2, 2), axis_names=("fsdp", "model"))
    params = {"up_proj": {"kernel": shape(256, 512)}}
    layout = make_layout(params, mesh, "fsdp+megatron")
    assert layout.specs["up_proj"]["kernel"] == P("fsdp", "model")
    state = jax.eval_shape(optax.adafactor(1e-3).init, params)
    found = {
        leaf.shape: sharding.spec
        for leaf, sharding in zip(
            jax.tree.leaves(state), jax.tree.leaves(layout.for_optimizer_state(state)), strict=True
        )
    }
    assert found[(256,)] == P("fsdp")
    assert found[(512,)] == P("model")
    assert found[(1,)] == P()


def test_scales_of_blocks_are_split_with_their_parameter():
    mesh = abstract_mesh(mesh_shape=(2, 4), axis_names=("fsdp", "model"))
    params = {"up_proj": {"kernel": shape(256, 2048)}, "gate_proj": {"kernel": shape(256, 512)}}
    layout = make_layout(params, mesh, "fsdp+megatron")
    state = jax.eval_shape(scale_by_int8_adam().init, params)
    placed = layout.for_optimizer_state(state)
    assert placed.mu["up_proj"]["kernel"].spec == P("fsdp", "model")
    assert state.mu_scales["up_proj"]["kernel"].shape == (256, 8)
    assert placed.mu_scales["up_proj"]["kernel"].spec == P("fsdp", "model")
    assert state.nu_scales["gate_proj"]["kernel"].shape == (256, 2)  # too few blocks for four
    assert placed.nu_scales["gate_proj"]["kernel"].spec == P("fsdp")


def test_the_batch_is_split_over_every_batch_like_axis(layout):
    assert layout.batch_spec == P(("fsdp", "expert"))
    mesh = abstract_mesh(mesh_shape=(2, 2, 2, 2), axis_names=("dcn", "data", "context", "model"))
    tree = {"up_proj": {"kernel": shape(64, 128)}}
    assert make_layout(tree, mesh, "megatron+context").batch_spec == P(("dcn", "data"), "context")
    assert make_layout(tree, mesh, "megatron+sequence").batch_spec == P(("dcn", "data"))


def test_an_idle_axis_and_a_big_replica_are_reported(caplog):
    mesh = abstract_mesh(mesh_shape=(2, 4), axis_names=("data", "model"))
    tree = {"table": shape(2049, 2049), "w": shape(64, 64)}
    with caplog.at_level(logging.WARNING):
        report = make_layout(tree, mesh, "fsdp").report
    assert report.big_replicated == ("table",)
    assert report.idle_axes == {"model": 4}
    assert "every device holds in full: table" in caplog.text
    assert "Mesh axis model=4 splits nothing, so 4 devices repeat" in caplog.text
    # Data parallelism replicates on purpose.
    assert make_layout(tree, mesh, "data").report.big_replicated == ()


def test_a_layout_shows_itself(layout):
    console = Console(width=140, record=True, file=io.StringIO())
    console.print(layout)
    text = console.export_text()
    assert "layers/moe/experts/up" in text
    assert "-, expert, fsdp, model" in text
    assert "expert+megatron+fsdp" in text


def test_padding_grows_hidden_units_and_vocabularies_only():
    mesh = abstract_mesh(mesh_shape=(4,), axis_names=("model",))
    tree = {
        "up_proj": {"kernel": shape(64, 130)},
        "down_proj": {"kernel": shape(130, 64)},
        "embed": {"embedding": shape(257, 64)},
    }
    layout = make_layout(tree, mesh, "megatron", pad=True)
    grown = {one.path: one.placed_shape for one in layout.report.placements}
    assert grown == {
        "up_proj/kernel": (64, 132),
        "down_proj/kernel": (132, 64),
        "embed/embedding": (260, 64),
    }
    state = {"mu": {"up_proj": {"kernel": jnp.arange(64.0 * 132).reshape(64, 132)}}}
    assert unpad(state, layout)["mu"]["up_proj"]["kernel"].shape == (64, 130)

"""Strategies and their products: what each splits, in which order, and how they refuse."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from tpukit.errors import ShardingError
from tpukit.parallel import abstract_mesh, make_layout
from tpukit.parallel.sharding.strategy import parse_strategy, strategy_names


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


# A stack of four layers with eight experts each, and grouped-query attention with two kv heads.
MODEL = {
    "embed": {"embedding": shape(512, 64)},
    "layers": {
        "attention": {
            "q": {"kernel": shape(4, 64, 8, 16)},
            "k": {"kernel": shape(4, 64, 2, 16)},
            "out": {"kernel": shape(4, 8, 16, 64)},
        },
        "moe": {
            "router": {"kernel": shape(4, 64, 8)},
            "experts": {"up": shape(4, 8, 64, 128), "down": shape(4, 8, 128, 64)},
        },
        "norm": {"scale": shape(4, 64)},
    },
    "lm_head": {"kernel": shape(64, 512)},
}


def mesh(**axes):
    return abstract_mesh(mesh_shape=tuple(axes.values()), axis_names=tuple(axes))


def specs(strategy, **axes):
    report = make_layout(MODEL, mesh(**axes), strategy).report
    return {placement.path: placement.spec for placement in report.placements}


def test_fsdp_splits_every_matrix_once_and_never_the_layer_axis():
    found = specs("fsdp", fsdp=4)
    assert found["embed/embedding"] == P(None, "fsdp")
    assert found["layers/attention/q/kernel"] == P(None, "fsdp")
    assert found["layers/norm/scale"] == P()


@pytest.mark.parametrize(("embed", "spec"), [(512, P(None, "fsdp")), (384, P("fsdp"))])
def test_fsdp_leaves_a_last_side_whose_shares_would_be_padding(embed, spec):
    # 512 over four devices are whole rows of 128 lanes; 384 are 96, for which memory holds 128.
    down = {"mlp": {"down_proj": {"kernel": shape(1024, embed)}}}
    found = make_layout(down, mesh(fsdp=4), "fsdp").specs
    assert found["mlp"]["down_proj"]["kernel"] == spec


def test_fsdp_takes_the_longest_divisible_side_where_names_say_nothing():
    odd = {"a": shape(60, 90, 100), "small": shape(5, 5), "prime": shape(97, 89)}
    found = make_layout(odd, mesh(fsdp=4), "fsdp").specs
    assert found == {"a": P(None, None, "fsdp"), "small": P(), "prime": P()}


def test_fsdp_uses_the_data_axis_only_without_an_fsdp_axis():
    assert specs("fsdp", data=2, model=2)["embed/embedding"] == P(None, "data")
    assert specs("fsdp", data=2, fsdp=2)["embed/embedding"] == P(None, "fsdp")


def test_megatron_splits_heads_hidden_units_and_vocabulary():
    found = specs("megatron", data=1, model=4)
    assert found["embed/embedding"] == P("model")
    assert found["layers/attention/q/kernel"] == P(None, None, "model")
    assert found["layers/attention/out/kernel"] == P(None, "model")
    assert found["layers/moe/experts/up"] == P(None, None, None, "model")
    assert found["layers/moe/experts/down"] == P(None, None, "model")
    assert found["lm_head/kernel"] == P(None, "model")
    # Two kv heads on four devices: every device keeps both.
    assert found["layers/attention/k/kernel"] == P()
    assert found["layers/moe/router/kernel"] == P()


def test_fsdp_leaves_experts_whole_where_they_divide():
    found = specs("fsdp", fsdp=8)
    assert found["layers/moe/experts/up"] == P(None, "fsdp")
    assert found["layers/moe/experts/down"] == P(None, "fsdp")
    found = specs("fsdp", fsdp=16)
    assert found["layers/moe/experts/up"] == P(None, None, "fsdp")


def test_experts_take_the_fsdp_axes_they_divide_over_and_another_side_the_rest():
    found = specs("fsdp", fsdp=8, zero=2)
    assert found["layers/moe/experts/up"] == P(None, "fsdp", "zero")
    assert found["layers/moe/experts/down"] == P(None, "fsdp", "zero")
    assert found["layers/attention/q/kernel"] == P(None, ("fsdp", "zero"))
    assert specs("fsdp", zero=4, fsdp=2)["layers/moe/experts/up"] == P(None, ("zero", "fsdp"))
    # No side divides by three: those devices keep the same.
    assert specs("fsdp", fsdp=8, zero=3)["layers/moe/experts/up"] == P(None, "fsdp")


def test_two_fsdp_axes_split_two_sides_where_no_side_divides_over_both():
    odd = {"a": shape(60, 90, 100), "prime": shape(97, 89)}
    found = make_layout(odd, mesh(fsdp=20, zero=3), "fsdp").specs
    assert found == {"a": P(("fsdp", "zero")), "prime": P()}
    found = make_layout(odd, mesh(fsdp=20, zero=9), "fsdp").specs
    assert found == {"a": P(None, "zero", "fsdp"), "prime": P()}


def test_a_product_asks_the_structural_strategies_first():
    axes = {"stage": 2, "fsdp": 2, "expert": 4, "model": 2}
    found = specs("fsdp+megatron+expert+pipeline", **axes)
    assert found == specs("pipeline+expert+megatron+fsdp", **axes)
    assert found["layers/moe/experts/up"] == P("stage", "expert", "fsdp", "model")
    assert found["layers/attention/q/kernel"] == P("stage", "fsdp", "model")
    assert found["layers/norm/scale"] == P("stage")
    assert found["lm_head/kernel"] == P("fsdp", "model")


@pytest.mark.parametrize("strategy", ["data", "sequence", "context", "data+sequence+context"])
def test_activation_strategies_leave_parameters_whole(strategy):
    found = specs(strategy, data=2, context=2, model=2)
    assert set(found.values()) == {P()}


def test_strategies_are_listed_in_order_of_precedence():
    assert [one.name for one in parse_strategy("data + fsdp+ pipeline")] == [
        "pipeline",
        "fsdp",
        "data",
    ]
    assert len(strategy_names()) == 7


@pytest.mark.parametrize(
    ("strategy", "axes", "message"),
    [
        ("fspd", {"data": 8}, r"Unknown sharding strategy 'fspd'.*Did you mean 'fsdp'"),
        ("fsdp+", {"data": 8}, r"Unknown sharding strategy ''"),
        ("fsdp+fsdp", {"data": 8}, r"names 'fsdp' twice"),
        ("megatron", {"data": 8}, r"'megatron' needs a mesh axis called 'model' or .* has data=8"),
        ("megatron", {"modle": 8}, r"the mesh has modle=8;.*Did you mean 'model'"),
        ("expert", {"data": 2, "expert": 3}, r"expert=8 does not divide over expert=3"),
        ("pipeline", {"stage": 3}, r"layers=4 does not divide over stage=3; .* 1, 2, 4"),
        (
            "megatron",
            {"model": 16},
            r"out/kernel: heads=8 does not divide over model=16; .* 1, 2, 4, 8",
        ),
    ],
)
def test_a_strategy_that_cannot_work_says_why(strategy, axes, message):
    with pytest.raises(ShardingError, match=message):
        make_layout(MODEL, mesh(**axes), strategy)


@pytest.mark.parametrize(
    ("strategy", "axis", "message"),
    [
        ("pipeline", "stage", "found no parameter to shard among 1 arrays; stack the layers"),
        ("expert", "expert", "keep the experts in one array"),
        ("megatron", "model", "label the dimensions"),
    ],
)
def test_a_strategy_with_nothing_to_do_is_an_error(strategy, axis, message):
    square = {"w": shape(64, 64)}
    with pytest.raises(ShardingError, match=message):
        make_layout(square, mesh(**{axis: 2}), strategy)
    make_layout(square, mesh(**{axis: 1}), strategy)  # an axis of one splits nothing anyway


def test_merged_heads_are_not_cut_in_two():
    tree = {"attn": {"q_proj": {"kernel": shape(64, 64)}, "k_proj": {"kernel": shape(64, 32)}}}
    heads = {"heads": 4, "kv_heads": 2}
    layout = make_layout(tree, mesh(model=4), "megatron", head_counts=heads)
    assert layout.specs["attn"]["q_proj"]["kernel"] == P(None, "model")
    assert layout.specs["attn"]["k_proj"]["kernel"] == P()
    with pytest.raises(ShardingError, match="heads=4 does not divide over model=8"):
        make_layout(tree, mesh(model=8), "megatron", head_counts=heads)


def test_a_guess_from_shapes_never_refuses():
    tree = {"first": {"kernel": shape(10, 15)}, "second": {"kernel": shape(16, 10)}}
    found = make_layout(tree, mesh(model=4), "megatron").specs
    assert found["first"]["kernel"] == P()
    assert found["second"]["kernel"] == P("model")

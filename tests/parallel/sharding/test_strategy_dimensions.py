"""Names that published models use are understood: which dimension is which."""

import pytest

from tpukit.parallel.sharding.dimensions import find_stacks, infer_dims


@pytest.mark.parametrize(
    ("path", "shape", "dims"),
    [
        # flax: llama-like, merged heads
        ("layers/0/self_attn/q_proj/kernel", (64, 32), ("embed", "heads")),
        ("layers/0/self_attn/k_proj/kernel", (64, 16), ("embed", "kv_heads")),
        ("layers/0/self_attn/o_proj/kernel", (32, 64), ("heads", "embed")),
        ("layers/0/mlp/gate_proj/kernel", (64, 96), ("embed", "mlp")),
        ("layers/0/mlp/down_proj/kernel", (96, 64), ("mlp", "embed")),
        ("embed_tokens/embedding", (256, 64), ("vocab", "embed")),
        ("lm_head/kernel", (64, 256), ("embed", "vocab")),
        ("final_norm/scale", (64,), ("embed",)),
        # flax MultiHeadAttention: separate heads, with biases
        ("attention/query/kernel", (64, 4, 16), ("embed", "heads", "head_dim")),
        ("attention/value/kernel", (64, 4, 16), ("embed", "kv_heads", "head_dim")),
        ("attention/query/bias", (4, 16), ("heads", "head_dim")),
        ("attention/out/kernel", (4, 16, 64), ("heads", "head_dim", "embed")),
        ("attention/out/bias", (64,), ("embed",)),
        # equinox and torch keep (out, in)
        ("layers/0/self_attn/q_proj/weight", (32, 64), ("heads", "embed")),
        ("layers/0/mlp/down_proj/weight", (64, 96), ("embed", "mlp")),
        ("lm_head/weight", (256, 64), ("vocab", "embed")),
        # GPT-2
        ("h/0/attn/c_attn/kernel", (64, 192), ("embed", "heads")),
        ("h/0/attn/c_proj/kernel", (64, 64), ("heads", "embed")),
        ("h/0/mlp/c_fc/kernel", (64, 256), ("embed", "mlp")),
        ("h/0/mlp/c_proj/kernel", (256, 64), ("mlp", "embed")),
        ("wte/embedding", (256, 64), ("vocab", "embed")),
        # T5 and bare arrays
        ("encoder/block/0/wi_0/kernel", (64, 128), ("embed", "mlp")),
        ("blocks/0/wq", (64, 64), ("embed", "heads")),
        ("lm_head", (256, 64), ("vocab", "embed")),
        # Mixtral
        ("layers/0/block_sparse_moe/gate/kernel", (64, 8), ("embed", "router")),
        ("layers/0/moe/experts/w1/kernel", (8, 64, 96), ("expert", "embed", "mlp")),
        ("layers/0/moe/experts/w2", (8, 96, 64), ("expert", "mlp", "embed")),
        ("layers/0/moe/experts/3/w1/kernel", (64, 96), ("embed", "mlp")),
        ("layers/0/moe/router/bias", (8,), ("router",)),
        # shapes alone
        ("first/kernel", (64, 256), ("embed", "mlp")),
        ("second/kernel", (256, 64), ("mlp", "embed")),
        ("square/kernel", (64, 64), (None, None)),
        ("conv/kernel", (3, 3, 8, 16), (None, None, None, None)),
        ("temperature", (), ()),
    ],
)
def test_dimensions_are_read_from_names(path, shape, dims):
    assert infer_dims(path, shape)[0] == dims


def test_only_shapes_are_a_guess():
    assert infer_dims("first/kernel", (64, 256))[1]
    assert not infer_dims("up_proj/kernel", (64, 256))[1]


def test_a_stack_has_a_layer_axis():
    shapes = {
        "layers/q_proj/kernel": (3, 64, 32),
        "layers/norm/scale": (3, 64),
        "head/kernel": (64, 256),
    }
    assert find_stacks(shapes) == {"layers/q_proj/kernel", "layers/norm/scale"}
    assert infer_dims("layers/q_proj/kernel", (3, 64, 32), stacked=True)[0] == (
        "layers",
        "embed",
        "heads",
    )


def test_each_kind_of_layer_may_be_a_stack_of_its_own():
    shapes = {
        "layers/dense/up_proj/kernel": (1, 64, 32),
        "layers/dense/norm/scale": (1, 64),
        "layers/moe/up_proj/kernel": (4, 64, 16),
        "layers/moe/norm/scale": (4, 64),
    }
    assert find_stacks(shapes) == set(shapes)


@pytest.mark.parametrize(
    "shapes",
    [
        {"layers/0/kernel": (3, 64, 32), "layers/1/kernel": (3, 64, 32)},  # numbered
        {"block/kernel": (64, 64), "block/bias": (64,)},  # one plain layer
        {"block/q/kernel": (64, 4, 16), "block/out/kernel": (4, 16, 64)},  # separate heads
    ],
)
def test_what_is_no_stack_is_left_alone(shapes):
    assert find_stacks(shapes) == set()


def test_a_hint_finds_a_stack_by_another_name():
    assert find_stacks({"tower/w": (4, 8, 8), "w": (8, 8)}, hints=["^tower/"]) == {"tower/w"}

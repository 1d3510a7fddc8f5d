"""A user's function becomes an op: precision, padding, dispatch, gradient, blocks, registry."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from tpukit.errors import TPUKernelError
from tpukit.hardware.target import target_chip
from tpukit.kernels.precision import PrecisionConfig
from tpukit.kernels.registry.op import BlockSizes, KernelCase
from tpukit.kernels.registry.registry import get_tpu_op, list_tpu_ops, unregister_tpu_op
from tpukit.kernels.registry.user_kernel import register_tpu_op, tpu_kernel

SQUARE = jnp.asarray(np.random.default_rng(0).normal(size=(5, 130)), jnp.float32)


@dataclass(frozen=True)
class Rows(BlockSizes):
    rows: int


def pallas_scaled(x, *, factor, blocks=None, interpret=True):
    """A kernel that wants whole tiles."""
    assert x.shape[0] % 8 == 0
    assert x.shape[1] % 128 == 0

    def body(x_ref, out_ref):
        out_ref[...] = factor * x_ref[...]

    return pl.pallas_call(body, out_shape=x, interpret=interpret)(x)


@pytest.fixture
def scaled():
    """An op of a plain function and a Pallas kernel, padded, with blocks."""

    @tpu_kernel(
        on_tpu=pallas_scaled,
        pad_to_tiles=True,
        default_blocks=lambda case, chip: Rows(8),
        block_space=lambda case, chip: [Rows(8), Rows(1024), Rows(2**20)],
        vmem_bytes=lambda case, blocks: blocks.rows * 16384,
        cases=[KernelCase("small", (jax.ShapeDtypeStruct((8, 128), "float32"),), {"factor": 2.0})],
    )
    def scaled(x, *, factor):
        """Documented."""
        return factor * x

    return scaled


def test_bare_it_is_the_function_with_a_name():
    @tpu_kernel
    def double(x):
        """Twice."""
        return 2 * x

    assert double(SQUARE).tolist() == (2 * SQUARE).tolist()
    assert (double.name, double.__doc__, double.op.name) == ("double", "Twice.", "double")
    assert jax.grad(lambda x: double(x).sum())(SQUARE).tolist() == [[2.0] * 130] * 5


def test_a_pallas_kernel_gets_whole_tiles_and_the_gradient_of_its_reference(scaled):
    found = scaled(SQUARE, factor=3.0, implementation="pallas_tpu")
    assert found.shape == SQUARE.shape
    np.testing.assert_array_equal(found, 3 * SQUARE)
    for implementation in (None, "pallas_tpu"):
        gradient = jax.grad(
            lambda x, name=implementation: scaled(x, factor=3.0, implementation=name).sum()
        )(SQUARE)
        np.testing.assert_array_equal(gradient, np.full(SQUARE.shape, 3.0))
    bound = scaled.op.bind(scaled.op.case("small"))
    np.testing.assert_array_equal(bound(jnp.ones((8, 128))), np.full((8, 128), 2.0))


def test_blocks_that_do_not_fit_are_refused_with_the_largest_that_do(scaled):
    with target_chip("v5e"), pytest.raises(TPUKernelError, match=r"largest that fit are rows=1024"):
        scaled(SQUARE, factor=1.0, blocks=Rows(2**20))
    with target_chip("v5e"):
        scaled(SQUARE, factor=1.0, blocks=Rows(1024))


def test_a_gradient_of_ones_own():
    @tpu_kernel(gradient=lambda arrays, cotangent: (100 * cotangent,))
    def plain(x):
        return x

    assert jax.grad(lambda x: plain(x).sum())(jnp.ones(3)).tolist() == [100.0] * 3


def test_precision_casts_in_and_back():
    seen = []

    @tpu_kernel(precision=PrecisionConfig.BFLOAT16)
    def product(a, b, count):
        seen.append((a.dtype.name, count.dtype.name))
        return a @ b, count

    out, count = product(jnp.ones((4, 4)), jnp.ones((4, 4)), jnp.arange(3))
    assert seen == [("bfloat16", "int32")]
    assert (out.dtype, count.dtype) == (jnp.float32, jnp.int32)


def test_high_precision_is_asked_of_the_matrix_unit():
    @tpu_kernel(precision=PrecisionConfig.HIGH)
    def product(a, b):
        return a @ b

    text = jax.jit(product).lower(jnp.ones((4, 4)), jnp.ones((4, 4))).as_text()
    assert "HIGH, HIGH" in text


def test_fp8_is_refused_where_the_generation_has_none():
    @tpu_kernel(precision="fp8")
    def product(a, b):
        return a @ b

    with (
        target_chip("v5p"),
        pytest.raises(TPUKernelError, match=r"7x, 8i, 8t have it. v5p supports bf16, int8"),
    ):
        product(SQUARE, SQUARE.T)
    with target_chip("7x"):
        product(SQUARE, SQUARE.T)


HEADS = jax.ShapeDtypeStruct((1, 4096, 2, 16), jnp.float32)


def attention_by_hand(q, k, v):
    weights = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


@pytest.mark.parametrize("attend", [attention_by_hand, jax.nn.dot_product_attention])
def test_efficient_attention_refuses_all_scores_at_once(attend):
    layer = tpu_kernel(lambda q, k, v: attend(q, k, v), name="layer", use_efficient_attention=True)
    message = r"layer .* all scores at once, float32\[1,2,4096,(1,)?4096\]; call tpukit"
    with pytest.raises(TPUKernelError, match=message):
        jax.eval_shape(layer, HEADS, HEADS, HEADS)


def test_efficient_attention_takes_blocks_and_short_sequences():
    def in_rows(q, k, v):
        rows = q.reshape(8, 1, 512, 2, 16)
        out = jax.lax.map(lambda part: attention_by_hand(part, k, v), rows)
        return out.reshape(q.shape)

    layer = tpu_kernel(in_rows, use_efficient_attention=True)
    assert jax.eval_shape(layer, HEADS, HEADS, HEADS).shape == HEADS.shape
    short = jax.ShapeDtypeStruct((1, 128, 2, 16), jnp.float32)
    layer = tpu_kernel(attention_by_hand, use_efficient_attention=True)
    assert jax.eval_shape(layer, short, short, short).shape == short.shape


def test_flash_attention_keeps_the_promise():
    from tpukit.kernels.ops.flash_attention.api import flash_attention

    @tpu_kernel(use_efficient_attention=True)
    def self_attention_layer(query, key, value):
        return flash_attention(query, key, value, use_flash=True)

    assert jax.eval_shape(self_attention_layer, HEADS, HEADS, HEADS).shape == HEADS.shape


def test_padding_refuses_what_it_cannot_cut_back():
    @tpu_kernel(pad_to_tiles=True, on_tpu=lambda x: x[:2])
    def rows(x):
        return x

    with pytest.raises(TPUKernelError, match="only for kernels whose results grow"):
        rows(SQUARE, implementation="pallas_tpu")


def test_registering_finding_replacing_and_forgetting():
    @register_tpu_op
    def my_first_op(x):
        return x + 1

    try:
        assert get_tpu_op("my_first_op").function(1) == 2
        assert "my_first_op" in list_tpu_ops()
        with pytest.raises(TPUKernelError, match=r"already registered, as .*my_first_op"):
            register_tpu_op(lambda x: x, name="my_first_op")
        register_tpu_op(lambda x: x + 5, name="my_first_op", replace=True)
        assert get_tpu_op("my_first_op").function(1) == 6
        assert my_first_op(1) == 2
    finally:
        unregister_tpu_op("my_first_op")
    with pytest.raises(TPUKernelError, match=r"There is no op 'my_first_op'"):
        get_tpu_op("my_first_op")
    with pytest.raises(TPUKernelError, match=r"No op 'my_first_op' is registered; .* none"):
        unregister_tpu_op("my_first_op")


def test_tpukits_own_ops_are_there_and_stay():
    assert get_tpu_op("layer_norm").name == "layer_norm"
    assert "rms_norm" in list_tpu_ops()
    with pytest.raises(TPUKernelError, match="cannot be replaced; give another name="):
        register_tpu_op(lambda x: x, name="layer_norm", replace=True)
    with pytest.raises(TPUKernelError, match="is a built-in op"):
        unregister_tpu_op("layer_norm")
    with pytest.raises(TPUKernelError, match="Did you mean 'layer_norm'"):
        get_tpu_op("layernorm")


def test_what_is_no_setting_no_function_or_no_name_is_refused():
    with pytest.raises(TPUKernelError, match="Did you mean 'pad_to_tiles'"):
        tpu_kernel(pad_to_tile=True)
    with pytest.raises(TPUKernelError, match="on_tpu= of @tpu_kernel takes a function, but got 3"):
        tpu_kernel(lambda x: x, on_tpu=3)
    with pytest.raises(TPUKernelError, match="takes a function, but got 3"):
        tpu_kernel(3)
    with pytest.raises(TPUKernelError, match="'<lambda>' is not an identifier"):
        register_tpu_op(lambda x: x)


def test_settings_that_contradict_are_refused():
    with pytest.raises(TPUKernelError, match="without default_blocks="):
        tpu_kernel(lambda x: x, name="f", vmem_bytes=lambda case, blocks: 0)
    with pytest.raises(TPUKernelError, match=r"is not a precision; .* Did you mean 'high'"):
        tpu_kernel(lambda x: x, name="f", precision="hihg")
    with pytest.raises(TPUKernelError, match="takes no blocks="):
        tpu_kernel(lambda x: x, name="f")(SQUARE, blocks=Rows(8))
    with pytest.raises(TPUKernelError, match="is already an op and cannot take name"):
        register_tpu_op(tpu_kernel(lambda x: x, name="f"), name="g")

"""Experts in eight-bit floats: the numbers of qwix's ragged products, on any mesh."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from qwix._src.core import qarray, ragged_dot
from qwix._src.core.ragged_dot_qt import RaggedDotQtConfig, ragged_dot_qt

from tpukit.kernels.ops.grouped_matmul import pallas_tpu
from tpukit.kernels.ops.grouped_matmul.api import multiply_groups, sum_groups
from tpukit.parallel.experts.float8 import grouped_matmul_float8, round_weight
from tpukit.parallel.experts.layer import moe_ffn

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
SIZES = np.asarray([5, 0, 11, 16], np.int32)


def operands(dtype: str):
    """Rows and weights of which some lie outside ±224, and a gradient."""
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(32, 24)) * 100
    weights = rng.normal(size=(4, 24, 16)) * np.exp(rng.normal(size=16) * 3)
    gradient = rng.normal(size=(32, 16)) * np.exp(rng.normal(size=(32, 1)) * 4)
    return [jnp.asarray(one, dtype) for one in (rows, weights, gradient)]


def near(found, expected, dtype):
    # In bfloat16 to the bit; float32 shows in which order a sum was taken.
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == dtype
        one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
        room = 1e-6 * np.abs(other).max() if dtype == "float32" else 0
        np.testing.assert_allclose(one, other, rtol=0, atol=room)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scaled_by_row_and_column_it_has_the_numbers_of_qwix(dtype):
    rows, weights, gradient = operands(dtype)
    config = RaggedDotQtConfig(
        lhs_qtype=E4M3, rhs_qtype=E4M3, dlhs_grad_qtype=E5M2, drhs_grad_qtype=E5M2
    )
    expected, pull = jax.vjp(lambda r, w: ragged_dot_qt(r, w, SIZES, config), rows, weights)
    found, own_pull = jax.vjp(
        lambda r, w: grouped_matmul_float8(r, w, jnp.asarray(SIZES), bound=None), rows, weights
    )
    near((found, *own_pull(gradient)), (expected, *pull(gradient)), dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rounded_before", [False, True])
def test_with_a_constant_scale_it_has_the_numbers_of_qwix(dtype, rounded_before):
    rows, weights, gradient = operands(dtype)
    fixed = qarray.HowToQuantize(qtype=E4M3, calibration_method="fixed,-224,224")
    left, right = qarray.quantize(rows, fixed), qarray.quantize(weights, fixed)
    expected = ragged_dot.ragged_dot(left, right, SIZES)
    by_row = qarray.quantize(
        gradient * right.scale[0], qarray.HowToQuantize(qtype=E5M2, channelwise_axes=[0])
    )
    by_column = qarray.quantize(
        gradient * left.scale, qarray.HowToQuantize(qtype=E5M2, channelwise_axes=[1])
    )
    sums = jax.lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), [0], [])
    d_rows = ragged_dot.ragged_dot(by_row, right.qvalue.swapaxes(1, 2), SIZES)
    d_weights = ragged_dot.ragged_dot_general(left.qvalue, by_column, SIZES, sums)

    def ours(rows, weights):
        weight = round_weight(weights, 224.0) if rounded_before else weights
        return grouped_matmul_float8(rows, weight, jnp.asarray(SIZES), bound=224.0)

    found, pull = jax.vjp(ours, rows, weights)
    near((found, *pull(gradient)), (expected, d_rows, d_weights), dtype)


def test_the_kernels_multiply_as_xla_does():
    rng = np.random.default_rng(1)
    rows = jnp.asarray(rng.normal(size=(48, 128)), E4M3)
    others = jnp.asarray(rng.normal(size=(48, 256)), E5M2)
    weights = jnp.asarray(rng.normal(size=(4, 128, 256)), E4M3)
    sizes, f32 = jnp.asarray(SIZES), jnp.float32
    scales = jnp.asarray(rng.uniform(0.5, 2.0, size=(1, 256)), f32)
    forward = pallas_tpu.grouped_product(
        rows, weights, sizes, dtype=f32, transposed=False, factor=0.25, interpret=True
    )
    backward = pallas_tpu.grouped_product(
        others, weights, sizes, dtype=f32, transposed=True, interpret=True
    )
    summed = pallas_tpu.grouped_sum(rows, others, sizes, scales, dtype=f32, interpret=True)
    close = partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-4)
    close(forward, multiply_groups(rows, weights, sizes, dtype=f32) * 0.25)
    close(backward, multiply_groups(others, weights, sizes, dtype=f32, transposed=True))
    close(summed, sum_groups(rows, others, sizes, jnp.ones_like(scales), dtype=f32) * scales)
    assert not np.asarray(forward)[SIZES.sum() :].any()


@pytest.mark.parametrize("routing", ["dropless", "capacity"])
@pytest.mark.parametrize("axes", [{"fsdp": 4}, {"fsdp": 2, "expert": 2}, {"fsdp": 2, "tensor": 2}])
def test_any_mesh_gives_what_one_device_does(axes, routing):
    rng = np.random.default_rng(2)
    x = jnp.asarray(rng.normal(size=(8, 4, 16)), jnp.float32)
    router = jnp.asarray(rng.normal(size=(16, 4)), jnp.float32)
    shapes = ((4, 16, 32), (4, 16, 32), (4, 32, 16))
    weights = [jnp.asarray(rng.normal(size=shape) / 4, jnp.float32) for shape in shapes]

    def loss(x, weights, **where):
        y, _ = moe_ffn(
            *(x, router, *weights),
            k=2,
            routing=routing,
            groups=4,
            float8=True,
            float8_bound=224.0,
            **where,
        )
        return jnp.sum(jnp.sin(y)), y

    expected = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(x, weights)
    mesh = jax.make_mesh(
        tuple(axes.values()), tuple(axes), axis_types=(jax.sharding.AxisType.Auto,) * len(axes)
    )
    where = {"mesh": mesh, "axis": "expert" if "expert" in axes else None}
    split = jax.jit(jax.value_and_grad(partial(loss, **where), argnums=(0, 1), has_aux=True))
    found = split(x, weights)
    # Columns of gradients are scaled by the largest of a device's own rows: another rounding.
    (value, y), (dx, d_weights) = found
    (value_one, y_one), (dx_one, d_weights_one) = expected
    np.testing.assert_allclose(value, value_one, rtol=1e-4)
    np.testing.assert_allclose(y, y_one, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dx, dx_one, rtol=0.05, atol=0.05 * float(np.abs(dx_one).max()))
    for one, other in zip(d_weights, d_weights_one, strict=True):
        assert np.linalg.norm(one - other) < 0.1 * np.linalg.norm(other)

"""Products in every precision and by every route are numpy's, and so are their gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpukit.errors import TPUKernelError
from tpukit.hardware.target import target_chip
from tpukit.kernels.ops.gemm import EIGHT_BITS, adaptive_matmul, gemm
from tpukit.kernels.precision import PrecisionConfig
from tpukit.kernels.registry.user_kernel import tpu_kernel
from tpukit.kernels.rounding import quantize


def draw(rows=100, width=200, columns=150, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(rows, width)), rng.normal(size=(width, columns))
    if dtype == jnp.int8:
        a, b = (np.clip(np.round(x * 50), -127, 127) for x in (a, b))
    return jnp.asarray(a, dtype), jnp.asarray(b, dtype)


def wide(x):
    return np.asarray(x.astype(jnp.float32), np.float64)


def assert_close(seen, expected, tolerance):
    error = np.abs(wide(seen) - expected).max()
    assert error <= tolerance * np.abs(expected).max()


def rounded(a, b, mode):
    format = EIGHT_BITS[mode]
    (a, a_scales), (b, b_scales) = quantize(a, format, axis=1), quantize(b, format, axis=0)
    return (wide(a) @ wide(b)) * wide(a_scales) * wide(b_scales)


@pytest.mark.parametrize(
    ("precision", "dtype", "result", "tolerance"),
    [
        (None, jnp.float32, "float32", 1e-6),
        (None, jnp.bfloat16, "bfloat16", 4e-3),
        ("bfloat16", jnp.float32, "float32", 4e-3),
        ("mixed", jnp.bfloat16, "float32", 1e-6),
        ("highest", jnp.bfloat16, "bfloat16", 4e-3),
        (PrecisionConfig.HIGH, jnp.float32, "float32", 1e-5),
        ("int8", jnp.float32, "float32", 0.02),
        ("fp8", jnp.float32, "float32", 0.05),
    ],
)
def test_precisions_and_their_gradients(precision, dtype, result, tolerance):
    a, b = draw(dtype=dtype)

    @jax.jit
    def step(a, b):
        out, pull = jax.vjp(lambda a, b: adaptive_matmul(a, b, precision=precision), a, b)
        return out, *pull(jnp.cos(out))

    out, d_a, d_b = step(a, b)
    assert out.dtype == result
    assert (d_a.dtype, d_b.dtype) == (dtype, dtype)
    assert_close(out, wide(a) @ wide(b), tolerance)
    cotangent = wide(jnp.cos(out))
    gradient = 4e-3 if precision in ("int8", "fp8", "mixed") else tolerance
    assert_close(d_a, cotangent @ wide(b).T, gradient)
    assert_close(d_b, wide(a).T @ cotangent, gradient)


@pytest.mark.parametrize("mode", ["int8", "fp8"])
def test_eight_bits_are_rounded_by_row_and_column_and_nothing_else_is(mode):
    a, b = draw()
    a = a * 1.5 ** jnp.arange(-50.0, 50.0)[:, None]  # one scale for all of a would lose most rows
    seen = wide(adaptive_matmul(a, b, precision=mode))
    expected = rounded(a, b, mode)
    np.testing.assert_allclose(seen, expected, rtol=1e-4, atol=0)


def test_integers_are_exact():
    a, b = draw(dtype=jnp.int8)
    out = adaptive_matmul(a, b)
    assert out.dtype == jnp.int32
    expected = np.asarray(a, np.int64) @ np.asarray(b, np.int64)
    np.testing.assert_array_equal(out, expected)


def exported(function, *arrays):
    return jax.export.export(jax.jit(function), platforms=["tpu"])(*arrays).mlir_module()


def test_no_precision_takes_a_kernel():
    a, b = (jax.ShapeDtypeStruct((256, 256), jnp.bfloat16),) * 2
    for precision in (None, "int8", "highest"):
        assert "custom_call" not in exported(call(precision=precision), a, b)


def test_the_documents_example_runs_anywhere():
    a, b = draw()
    example = tpu_kernel(
        lambda a, b: gemm(a, b, block_size=128, use_bfloat16=True), precision=PrecisionConfig.HIGH
    )
    np.testing.assert_allclose(example(a, b), a @ b, atol=0.02 * np.abs(a @ b).max())


def test_leading_axes_are_rows():
    a, b = draw()
    cube = adaptive_matmul(a.reshape(4, 25, -1), b)
    np.testing.assert_array_equal(cube.reshape(100, -1), adaptive_matmul(a, b))


def call(**options):
    return lambda a, b: adaptive_matmul(a, b, **options)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (call(tpu_strategy="colective"), "Did you mean 'collective'"),
        (call(precision="hihgest"), "Did you mean 'highest'"),
        (lambda a, b: adaptive_matmul(a[:, :-1], b), r"a \(100, 199\) by b \(200, 150\)"),
        (lambda a, b: adaptive_matmul(a.astype(jnp.int8), b), "int8 with int8"),
    ],
)
def test_what_is_wrong_is_said(function, message):
    with pytest.raises(TPUKernelError, match=message):
        function(*draw())


def test_eight_bits_where_there_are_none():
    a, b = draw()
    with target_chip("v5e"), pytest.raises(TPUKernelError, match=r"v5e has no fp8.*7x"):
        adaptive_matmul(a, b, precision="fp8")
    with target_chip("7x"), pytest.raises(TPUKernelError, match=r"7x has no int8.*v6e.*'fp8'"):
        adaptive_matmul(a, b, precision="int8")
    with target_chip("7x"):
        narrow = (x.astype(jnp.float8_e4m3fn) for x in (a, b))
        assert jax.eval_shape(adaptive_matmul, *narrow).dtype == jnp.float32

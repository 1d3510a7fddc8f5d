"""Products in every precision and by every route are numpy's, and so are their gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from tpukit.errors import TPUKernelError
from tpukit.hardware.target import target_chip
from tpukit.kernels.blocks.tuned import shape_bucket
from tpukit.kernels.ops.gemm.api import adaptive_matmul, gemm, matmul
from tpukit.kernels.ops.gemm.blocks import GemmBlocks
from tpukit.kernels.ops.gemm.modes import EIGHT_BITS
from tpukit.kernels.ops.gemm.specs import OP
from tpukit.kernels.precision import PrecisionConfig
from tpukit.kernels.registry.decorator import tpu_kernel
from tpukit.kernels.rounding import quantize

# Two blocks along every axis; the last ones stick out.
BLOCKS = GemmBlocks(rows=64, columns=128, contraction=128)


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
    seen = wide(adaptive_matmul(a, b, precision=mode, implementation="xla"))
    expected = rounded(a, b, mode)
    np.testing.assert_allclose(seen, expected, rtol=1e-4, atol=0)


def test_integers_are_exact():
    a, b = draw(dtype=jnp.int8)
    out = adaptive_matmul(a, b)
    assert out.dtype == jnp.int32
    expected = np.asarray(a, np.int64) @ np.asarray(b, np.int64)
    np.testing.assert_array_equal(out, expected)
    seen = matmul(
        a, b, precision="int8", implementation="pallas_tpu", blocks=BLOCKS, interpret=True
    )
    np.testing.assert_array_equal(seen, expected)


@pytest.mark.parametrize("mode", ["fp32", "int8"])
def test_the_kernel_in_the_tpu_interpreter(mode, no_races):
    a, b = draw()
    watchful = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    with no_races():
        seen = matmul(
            a,
            b,
            precision=mode,
            implementation="pallas_tpu",
            blocks=BLOCKS,
            interpret=watchful,
        )
    expected = wide(a) @ wide(b) if mode == "fp32" else rounded(a, b, mode)
    assert_close(seen, expected, 1e-6)


def exported(function, *arrays):
    return jax.export.export(jax.jit(function), platforms=["tpu"])(*arrays).mlir_module()


def test_the_kernel_is_taken_for_eight_bits_and_xla_for_the_rest():
    a, b = (jax.ShapeDtypeStruct((256, 256), jnp.bfloat16),) * 2
    assert "tpu_custom_call" not in exported(adaptive_matmul, a, b)
    assert "tpu_custom_call" in exported(lambda a, b: adaptive_matmul(a, b, precision="int8"), a, b)
    assert "tpu_custom_call" in exported(
        lambda a, b: adaptive_matmul(a, b, tpu_strategy="pallas"), a, b
    )
    assert "tpu_custom_call" in exported(lambda a, b: gemm(a, b, block_size=128), a, b)
    assert "tpu_custom_call" not in exported(gemm, a, b)


def test_a_strategy_is_for_tpus_and_the_documents_example_runs_anywhere():
    a, b = draw()
    example = tpu_kernel(
        lambda a, b: gemm(a, b, block_size=128, use_bfloat16=True), precision=PrecisionConfig.HIGH
    )
    assert_close = np.testing.assert_allclose
    assert_close(example(a, b), a @ b, atol=0.02 * np.abs(a @ b).max())
    text = jax.export.export(jax.jit(example), platforms=["tpu"])(a, b).mlir_module()
    assert "tpu_custom_call" in text
    with pytest.raises(TPUKernelError, match="does not run on the cpu here"):
        adaptive_matmul(a, b, implementation="pallas_tpu")


def test_leading_axes_are_rows():
    a, b = draw()
    cube = adaptive_matmul(a.reshape(4, 25, -1), b)
    np.testing.assert_array_equal(cube.reshape(100, -1), adaptive_matmul(a, b))


def test_tuned_blocks_are_looked_up_by_the_case_that_is_tuned(monkeypatch):
    from tpukit.kernels.ops.gemm import pallas_tpu

    asked = []
    monkeypatch.setattr(
        pallas_tpu, "blocks_for", lambda op, case, given: asked.append((op, case)) or BLOCKS
    )
    case = OP.case("small_int8")
    jax.eval_shape(OP.bind(case), *case.arguments)
    assert asked[0][0] == "gemm"
    assert shape_bucket(asked[0][1]) == shape_bucket(case)


def call(**options):
    return lambda a, b: adaptive_matmul(a, b, **options)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (call(tpu_strategy="palas"), "Did you mean 'pallas'"),
        (call(tpu_strategy="xla", implementation="reference"), "give one of them"),
        (call(implementation="cudnn"), "it has pallas_tpu, xla, reference"),
        (call(precision="high", tpu_strategy="pallas"), "in one pass or in six"),
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
    fp8 = OP.case("small_fp8")
    with target_chip("v5p"), pytest.raises(TPUKernelError, match=r"v5p has no fp8.*7x"):
        jax.eval_shape(OP.bind(fp8), *fp8.arguments)  # what the timer and the tuner call
    with target_chip("7x"):
        narrow = (x.astype(jnp.float8_e4m3fn) for x in (a, b))
        assert jax.eval_shape(adaptive_matmul, *narrow).dtype == jnp.float32


def test_blocks_that_do_not_fit_are_refused_with_those_that_do():
    a, b = (jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16),) * 2
    large = GemmBlocks(4096, 4096, 2048)
    with (
        target_chip("v6e"),
        pytest.raises(TPUKernelError, match=r"takes 320.0 MiB.*v6e has.*largest that fit are rows"),
    ):
        jax.eval_shape(call(tpu_strategy="pallas", blocks=large), a, b)

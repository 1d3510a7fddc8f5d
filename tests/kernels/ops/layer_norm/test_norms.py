"""Layer and RMS norm against float64, forward and gradient, as the TPU kernel would run."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from tpukit.errors import TPUKernelError
from tpukit.kernels.ops.layer_norm.api import OP as LAYER_NORM
from tpukit.kernels.ops.rms_norm.api import OP as RMS_NORM
from tpukit.kernels.ops.rms_norm.api import rms_norm
from tpukit.kernels.ops.rms_norm.pallas_tpu import RowBlocks

# Two cores, as v5p has: what they share must not depend on which of them is first.
STRICT = pltpu.InterpretParams(
    detect_races=True, uninitialized_memory="nan", num_cores_or_threads=2
)
EPS = 1e-5
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}


def draw(shape, dtype, seed=0):
    rng = np.random.default_rng(seed)
    x = jnp.asarray(3 * rng.normal(size=shape) + 1, dtype)
    scale, bias = (jnp.asarray(rng.normal(size=shape[-1:]), jnp.float32) for _ in range(2))
    return x, scale, bias, jnp.asarray(rng.normal(size=shape), dtype)


def truth(x, scale, bias, cotangent, *, centred):
    """Result and gradients in float64, by the definition and its derivative written out."""
    x, cotangent = np.asarray(x, np.float64), np.asarray(cotangent, np.float64)
    scale = np.ones(x.shape[-1]) if scale is None else np.asarray(scale, np.float64)
    centre = x - x.mean(-1, keepdims=True) if centred else x
    deviation = 1 / np.sqrt((centre**2).mean(-1, keepdims=True) + EPS)
    y = centre * deviation
    d = cotangent * scale
    dx = d - y * (d * y).mean(-1, keepdims=True)
    if centred:
        dx = dx - d.mean(-1, keepdims=True)
    rows = tuple(range(x.ndim - 1))
    out = y * scale + (0 if bias is None else np.asarray(bias, np.float64))
    return out, dx * deviation, (cotangent * y).sum(rows), cotangent.sum(rows)


def near(found, wanted, dtype):
    found = np.asarray(found, np.float64)
    assert np.isfinite(found).all()
    np.testing.assert_allclose(
        found, wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype] * (1 + np.abs(wanted).max())
    )


@pytest.mark.parametrize("op", [LAYER_NORM, RMS_NORM], ids=lambda op: op.name)
@pytest.mark.parametrize(
    ("shape", "dtype", "blocks"),
    [
        ((2, 24, 256), "bfloat16", RowBlocks(16)),  # three blocks: the second half has one
        ((37, 130), "float32", RowBlocks(16)),  # rows and lanes left over
    ],
    ids=["stacked", "ragged"],
)
def test_the_kernel_is_the_definition(op, shape, dtype, blocks, no_races):
    x, scale, bias, cotangent = draw(shape, dtype)
    centred = op is LAYER_NORM
    arrays = (x, scale, bias) if centred else (x, scale)
    kernel = op.implementations["pallas_tpu"]

    @jax.jit
    def run(arrays, cotangent):
        function = partial(kernel, eps=EPS, blocks=blocks, interpret=STRICT)
        out, pull = jax.vjp(function, *arrays)
        return out, pull(cotangent)

    with no_races():
        out, gradients = run(arrays, cotangent)
    wanted = truth(x, scale, bias if centred else None, cotangent, centred=centred)
    assert (out.dtype, out.shape) == (x.dtype, x.shape)
    for found, expected in zip((out, *gradients), wanted, strict=False):
        near(found, expected, dtype)


@pytest.mark.parametrize("given", ["scale", "bias", "nothing"])
def test_parameters_are_optional_and_fewer_rows_than_a_tile_will_do(given):
    x, scale, bias, cotangent = draw((5, 1, 128), "float32")
    scale, bias = (scale if given == "scale" else None), (bias if given == "bias" else None)
    kernel = LAYER_NORM.implementations["pallas_tpu"]
    out, pull = jax.vjp(lambda *arrays: kernel(*arrays, eps=EPS, interpret=True), x, scale, bias)
    wanted = truth(x, scale, bias, cotangent, centred=True)
    near(out, wanted[0], "float32")
    dx, dscale, dbias = pull(cotangent)
    near(dx, wanted[1], "float32")
    assert [dscale is None, dbias is None] == [scale is None, bias is None]


@pytest.mark.parametrize("op", [LAYER_NORM, RMS_NORM], ids=lambda op: op.name)
def test_the_reference_is_the_definition_in_float64_too(op):
    with jax.enable_x64(True):
        x, scale, bias, cotangent = draw((3, 7, 50), "float64")
        centred = op is LAYER_NORM
        arrays = (x, scale, bias) if centred else (x, scale)
        out, pull = jax.vjp(
            lambda *arrays: op.implementations["reference"](*arrays, eps=EPS), *arrays
        )
        wanted = truth(x, scale, bias if centred else None, cotangent, centred=centred)
        np.testing.assert_allclose(out, wanted[0], rtol=1e-12)
        np.testing.assert_allclose(pull(cotangent)[0], wanted[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("unfused", [{"use_fused_ops": False}, {"implementation": "reference"}])
def test_no_kernel_where_none_is_wanted(unfused):
    x, scale, _, _ = draw((32, 128), "float32")
    lowered = jax.jit(lambda x, s: rms_norm(x, s, **unfused)).trace(x, scale)
    assert "tpu_custom_call" not in lowered.lower(lowering_platforms=("tpu",)).as_text()


def test_rows_too_wide_for_vmem_are_left_to_xla():
    wide = jax.ShapeDtypeStruct((16, 2**19), jnp.float32)
    lowered = jax.jit(rms_norm).trace(wide).lower(lowering_platforms=("tpu",))
    assert "tpu_custom_call" not in lowered.as_text()
    with pytest.raises(TPUKernelError, match=r"8 rows of 524288 do not fit in the VMEM of every"):
        jax.eval_shape(lambda x: rms_norm(x, implementation="pallas_tpu"), wide)


def test_refusals_teach():
    x, scale, _, _ = draw((8, 128), "float32")
    with pytest.raises(TPUKernelError, match="give only one of them"):
        rms_norm(x, scale, use_fused_ops=False, implementation="pallas_tpu")
    with pytest.raises(TPUKernelError, match="takes float32 or bfloat16, but x is float16"):
        rms_norm(x.astype(jnp.float16), implementation="pallas_tpu")

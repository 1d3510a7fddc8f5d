"""The gated feed-forward block against float64, forward and gradient, as the kernel would run."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from tpukit.errors import TPUKernelError
from tpukit.hardware.target import target_chip
from tpukit.kernels.blocks.vmem import vmem_capacity_bytes
from tpukit.kernels.ops.gated_mlp.api import gated_mlp
from tpukit.kernels.ops.gated_mlp.blocks import GatedBlocks, bucket, fitted
from tpukit.kernels.ops.gated_mlp.specs import OP, case
from tpukit.kernels.registry.op import KernelCase

STRICT = pltpu.InterpretParams(
    detect_races=True, uninitialized_memory="nan", num_cores_or_threads=2
)
TOLERANCE = {"float32": 1e-5, "bfloat16": 3e-2}


def draw(rows, width, hidden, dtype):
    rng = np.random.default_rng(0)
    shapes = [(rows, width), (width, hidden), (width, hidden), (hidden, width), (rows, width)]
    return [jnp.asarray(rng.normal(size=s) / np.sqrt(s[0]), dtype) for s in shapes]


def truth(x, w_gate, w_up, w_down, cotangent):
    """Result and gradients for silu in float64, the derivative written out."""
    x, w_gate, w_up, w_down, g = (
        np.asarray(a, np.float64) for a in (x, w_gate, w_up, w_down, cotangent)
    )
    gate, up = x @ w_gate, x @ w_up
    sigmoid = 1 / (1 + np.exp(-gate))
    act, slope = gate * sigmoid, sigmoid * (1 + gate * (1 - sigmoid))
    hidden, d_hidden = act * up, g @ w_down.T
    d_gate, d_up = d_hidden * up * slope, d_hidden * act
    dx = d_gate @ w_gate.T + d_up @ w_up.T
    return hidden @ w_down, dx, x.T @ d_gate, x.T @ d_up, hidden.T @ g


def near(found, wanted, dtype):
    error = np.abs(np.asarray(found, np.float64) - wanted).max()
    assert error <= TOLERANCE[dtype] * np.abs(wanted).max()


@pytest.mark.parametrize(
    ("sizes", "dtype", "blocks"),
    [
        ((40, 256, 256), "bfloat16", GatedBlocks(32, 128, 128)),  # sums over two blocks
        ((24, 72, 130), "float32", GatedBlocks(32, 128, 128)),  # nothing is a multiple
    ],
    ids=["summed", "ragged"],
)
def test_the_kernel_is_the_definition(sizes, dtype, blocks, no_races):
    *arrays, cotangent = draw(*sizes, dtype)

    @jax.jit
    def run(arrays, cotangent):
        kernel = OP.implementations["pallas_tpu"]
        out, pull = jax.vjp(partial(kernel, blocks=blocks, interpret=STRICT), *arrays)
        return out, *pull(cotangent)

    with no_races():
        found = run(arrays, cotangent)
    for one, wanted in zip(found, truth(*arrays, cotangent), strict=True):
        near(one, wanted, dtype)


@pytest.mark.parametrize("activation", ["gelu", "relu"])
def test_other_activations_have_the_gradient_of_the_reference(activation):
    *arrays, cotangent = draw(16, 128, 128, "float32")
    results = []
    for name, options in (("pallas_tpu", {"interpret": True}), ("reference", {})):
        function = partial(OP.implementations[name], activation=activation, **options)
        out, pull = jax.vjp(function, *arrays)
        results.append((out, *pull(cotangent)))
    for one, wanted in zip(*results, strict=True):
        near(one, np.asarray(wanted, np.float64), "float32")


def test_dispatch_here_and_for_a_tpu_with_any_leading_shape():
    x, w_gate, w_up, w_down, _ = draw(12, 128, 128, "float32")
    call = jax.jit(gated_mlp)
    stacked = x.reshape(3, 4, 128)
    wanted = truth(x, w_gate, w_up, w_down, x)[0]
    near(call(stacked, w_gate, w_up, w_down).reshape(12, 128), wanted, "float32")
    for chip, kernels in (("v5e", 1), ("v6e", 0)):
        with target_chip(chip):
            traced = call.trace(stacked, w_gate, w_up, w_down)
        text = traced.lower(lowering_platforms=("tpu",)).as_text()
        assert text.count("tpu_custom_call") == kernels


def test_blocks_are_cut_to_the_arrays_and_fit_everywhere():
    assert fitted(GatedBlocks(512, 512, 512), 40, 768, 200) == GatedBlocks(64, 256, 256)
    assert fitted(GatedBlocks(512, 512, 512), 40, 200, 200).block_width == 200
    for chip in ("v4", "v5e", "v5p", "v6e", "7x", None):
        large = case(8192, 4096, 14336)
        assert OP.vmem_bytes(large, OP.default_blocks(large, chip)) <= vmem_capacity_bytes(chip)
    stacked = KernelCase("s", (jax.ShapeDtypeStruct((2, 4, 64), "bfloat16"), *large.arguments[1:]))
    assert bucket(stacked) == "bfloat16[8,64,16384]"


def test_refusals_teach():
    x, w_gate, w_up, w_down, _ = draw(8, 128, 128, "float32")
    with pytest.raises(TPUKernelError, match="four arrays of one dtype, float32 or bfloat16"):
        gated_mlp(x.astype(jnp.bfloat16), w_gate, w_up, w_down, implementation="pallas_tpu")

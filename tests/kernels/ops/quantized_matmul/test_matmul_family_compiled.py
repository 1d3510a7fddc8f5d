"""Mosaic accepts every format and precision of the matrix kernels on every generation that has it.

One case of every op is compiled where bundles are counted; here are the others, in one program.
"""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from tpukit.compiler.aot import compile_for
from tpukit.hardware.target import target_chip
from tpukit.kernels.ops.cross_entropy.api import OP as CROSS_ENTROPY
from tpukit.kernels.ops.gemm import adaptive_matmul
from tpukit.kernels.ops.quantized_matmul.api import OP as QUANTIZED

pytestmark = [pytest.mark.libtpu, pytest.mark.xdist_group("libtpu")]
SLICES = {"v5e": "v5e-1", "v5p": "v5p-8", "v6e": "v6e-1", "7x": "tpu7x-2x2x1"}
SMALL = QUANTIZED.cases[1:6]


@pytest.mark.parametrize("chip", SLICES)
def test_all_small_cases_in_one_program(chip):
    def everything(*arguments):
        pairs = zip(SMALL, arguments, strict=True)
        return [QUANTIZED.bind(case)(*arrays) for case, arrays in pairs]

    with target_chip(chip):
        compiled = compile_for(
            everything, SLICES[chip], *(case.arguments for case in SMALL), until="codegen"
        )
    assert compiled.stage == "codegen"


def gradients(x, w, labels, weights):
    def loss(x, w):
        return CROSS_ENTROPY.function(x, w, labels, weights, implementation="pallas_tpu").loss

    return jax.grad(loss, (0, 1))(x, w)


@pytest.mark.parametrize("function", [CROSS_ENTROPY.function, gradients])
def test_the_loss_needs_no_room_for_logits(function):
    tokens, width, vocab = 2048, 256, 32000
    shapes = [
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (
            ((tokens, width), jnp.bfloat16),
            ((width, vocab), jnp.bfloat16),
            ((tokens,), jnp.int32),
            ((tokens,), jnp.float32),
        )
    ]
    with target_chip("v6e"):
        compiled = compile_for(function, "v6e-1", *shapes, until="schedule")
    assert compiled.memory.temp_bytes < tokens * vocab * 4 / 20


def test_rows_of_a_collective_product_travel_while_others_are_multiplied():
    mesh = AbstractMesh((4,), ("tensor",), axis_types=(AxisType.Auto,))

    def sharded(shape, *axes):
        placed = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=placed)

    with target_chip("v6e"):
        compiled = compile_for(
            lambda a, b: adaptive_matmul(a, b, tpu_strategy="collective", mesh=mesh, axis="tensor"),
            "v6e-4",
            sharded((8192, 4096), "tensor", None),
            sharded((4096, 16384), None, "tensor"),
            until="schedule",
        )
    assert "all-gather" not in compiled.hlo
    steps = re.findall(
        r"%(collective-permute-(?:start|done)[.\d]*|convolution\w*[.\d]*) = .*(?:permute|kOutput)",
        compiled.hlo,
    )
    starts = [name for name in steps if "start" in name]
    assert len(starts) == 6  # three neighbours' rows, half of them each way around
    for start in starts:
        meanwhile = steps[steps.index(start) : steps.index(start.replace("start", "done"))]
        assert any(name.startswith("convolution") for name in meanwhile)

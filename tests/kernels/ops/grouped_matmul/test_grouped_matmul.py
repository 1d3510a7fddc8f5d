"""A grouped product is each row times its group's weight, gradients included, in float64."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from tpukit.errors import TPUKernelError
from tpukit.hardware import get_chip
from tpukit.kernels.blocks.vmem import vmem_capacity_bytes
from tpukit.kernels.ops.grouped_matmul.api import IMPLEMENTATIONS, OP, grouped_matmul
from tpukit.kernels.ops.grouped_matmul.blocks import (
    GroupedBlocks,
    GroupedShape,
    drhs_work,
    product_work,
)
from tpukit.kernels.registry.op import KernelCase

# Tiles that hold several groups, groups without rows, rows of nobody, and ends that stick out.
SIZES = (0, 13, 0, 21, 16, 5)
ROWS, WIDTH, COLUMNS = 60, 40, 200
BLOCKS = GroupedBlocks(16, 40, 128, 128, 40, 32, 40, 128)
# Every contraction and every sum in two parts, the second one masked.
CUT = GroupedBlocks(32, 128, 128, 128, 128, 16, 128, 128)


def draw(dtype=jnp.float32, width=WIDTH):
    rng = np.random.default_rng(0)
    shapes = ((ROWS, width), (len(SIZES), width, COLUMNS), (ROWS, COLUMNS))
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def by_numpy(lhs, rhs, cotangent, sizes=SIZES):
    lhs, rhs, cotangent = (
        np.asarray(a.astype(jnp.float32), np.float64) for a in (lhs, rhs, cotangent)
    )
    out, d_lhs, d_rhs = np.zeros_like(cotangent), np.zeros_like(lhs), np.zeros_like(rhs)
    for row, group in enumerate(np.repeat(np.arange(len(sizes)), sizes)):
        out[row] = lhs[row] @ rhs[group]
        d_lhs[row] = rhs[group] @ cotangent[row]
        d_rhs[group] += np.outer(lhs[row], cotangent[row])
    return out, d_lhs, d_rhs


@functools.cache
def compiled(function, **options):
    def step(lhs, rhs, cotangent, sizes):
        out, pull = jax.vjp(lambda *both: function(*both, sizes, **options), lhs, rhs)
        return out, *pull(cotangent)

    return jax.jit(step)


def with_gradients(function, arrays, sizes=SIZES, **options):
    return compiled(function, **options)(*arrays, jnp.asarray(sizes, jnp.int32))


def assert_close(seen, expected, tolerance):
    for one, other in zip(seen, expected, strict=True):
        error = np.abs(np.asarray(one.astype(jnp.float32), np.float64) - other).max()
        assert error <= tolerance * np.abs(other).max()


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_every_path_and_its_gradients(implementation):
    arrays = draw()
    seen = with_gradients(grouped_matmul, arrays, implementation=implementation)
    assert_close(seen, by_numpy(*arrays), 3e-6)


def test_the_kernels_in_the_tpu_interpreter(no_races):
    arrays = draw()
    watchful = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    with no_races():
        seen = with_gradients(
            IMPLEMENTATIONS["pallas_tpu"], arrays, blocks=BLOCKS, interpret=watchful
        )
    assert_close(seen, by_numpy(*arrays), 3e-6)


def test_tiles_of_the_contraction_that_stick_out():
    arrays = draw(width=200)
    seen = with_gradients(IMPLEMENTATIONS["pallas_tpu"], arrays, blocks=CUT, interpret=True)
    assert_close(seen, by_numpy(*arrays), 3e-6)


@pytest.mark.parametrize("sizes", [(60, 0, 0, 0, 0, 0), (0, 0, 0, 0, 0, 0), (1, 1, 1, 1, 1, 55)])
def test_one_group_no_group_and_many_in_a_tile(sizes):
    arrays = draw(jnp.bfloat16)
    seen = with_gradients(
        IMPLEMENTATIONS["pallas_tpu"], arrays, sizes, blocks=BLOCKS, interpret=True
    )
    assert_close(seen, by_numpy(*arrays, sizes), 1e-2)


@pytest.mark.parametrize("chip", ["v4", "v5e", "v5p", "v6e", "7x", None])
def test_default_blocks_fit_and_wait_for_the_matrix_unit_not_for_memory(chip):
    for case in OP.cases:
        blocks = OP.default_blocks(case, chip)
        assert OP.vmem_bytes(case, blocks) <= vmem_capacity_bytes(chip)
    if chip not in ("v5e", "v5p", "v6e", "7x"):
        return
    ridge = get_chip(chip).peak("bf16").value * 1e3 / get_chip(chip).hbm_gbps.value
    for width, columns in ((4096, 14336), (14336, 4096)):
        shape = GroupedShape(98304, width, columns, 8, 2)
        arrays = (
            jax.ShapeDtypeStruct((98304, width), jnp.bfloat16),
            jax.ShapeDtypeStruct((8, width, columns), jnp.bfloat16),
        )
        b = OP.default_blocks(KernelCase("of a training step", arrays), chip)
        for work in (
            product_work(shape, (b.rows, b.contraction, b.columns)),
            product_work(shape.transposed, (b.rows, b.dlhs_contraction, b.dlhs_columns)),
            drhs_work(shape, (b.drhs_rows, b.drhs_contraction, b.drhs_columns)),
        ):
            assert work.flops > work.hbm_bytes * ridge
            assert work.flops < 1.1 * 2 * 98304 * width * columns
            assert work.parts % get_chip(chip).cores_per_device == 0


def test_what_the_kernels_state_is_what_they_do():
    shape = GroupedShape(rows=60, width=40, columns=200, groups=6, itemsize=4)
    # Four tiles of rows and five more visits, two tiles of columns; rows are read for each.
    whole = product_work(shape, (16, 40, 128))
    assert whole.flops == 2 * 9 * 16 * 40 * 256
    assert whole.hbm_bytes == 4 * (6 * 40 * 256 + 2 * 60 * 40 + 60 * 200)
    assert whole.steps == 9 * 2
    # A contraction in parts reads rows and weights at every visit.
    parts = product_work(shape, (16, 20, 128))
    assert parts.hbm_bytes == 4 * (9 * 40 * 256 + 2 * 9 * 16 * 40 + 60 * 200)
    # Rows of nobody are only written.
    empty = product_work(dataclasses.replace(shape, empty_rows=100), (16, 40, 128))
    assert (empty.flops, empty.hbm_bytes) == (whole.flops, whole.hbm_bytes + 4 * 100 * 200)
    sums = drhs_work(shape, (32, 40, 128))
    assert sums.flops == 2 * 7 * 32 * 40 * 256
    assert sums.hbm_bytes == 4 * (7 * 32 * (2 * 40 + 256) + 6 * 40 * 200)


def test_what_is_wrong_is_said():
    lhs, rhs, _ = draw()
    sizes = jnp.asarray(SIZES)
    with pytest.raises(TPUKernelError, match="they must be the same"):
        grouped_matmul(lhs.astype(jnp.bfloat16), rhs, sizes)

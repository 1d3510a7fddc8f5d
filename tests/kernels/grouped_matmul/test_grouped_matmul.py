"""A grouped product is each row times its group's weight, gradients included, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from tpukit.errors import TPUKernelError
from tpukit.kernels.grouped_matmul.api import IMPLEMENTATIONS, grouped_matmul
from tpukit.kernels.grouped_matmul.blocks import GroupedBlocks
from tpukit.kernels.grouped_matmul.specs import OP
from tpukit.kernels.vmem import vmem_capacity_bytes

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


@pytest.mark.parametrize("implementation", ["reference", "xla", None])
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
def test_default_blocks_fit(chip):
    for case in OP.cases:
        blocks = OP.default_blocks(case, chip)
        assert OP.vmem_bytes(case, blocks) <= vmem_capacity_bytes(chip)
        if chip in ("v6e", "7x"):
            assert blocks.contraction == case.arguments[1].shape[1] or blocks.contraction > 2048


def test_a_program_for_a_tpu_holds_all_three_kernels():
    case = OP.case("small")
    step = jax.grad(lambda *arrays: grouped_matmul(*arrays).sum(), argnums=(0, 1))
    module = jax.export.export(jax.jit(step), platforms=["tpu"])(*case.arguments).mlir_module()
    # The product itself is not needed for the gradient of its sum.
    assert module.count("tpu_custom_call") >= 2


def test_what_is_wrong_is_said():
    lhs, rhs, _ = draw()
    sizes = jnp.asarray(SIZES)
    with pytest.raises(TPUKernelError, match=r"expected \(rows, K\) and \(groups, K, N\)"):
        grouped_matmul(lhs, rhs[0], sizes)
    with pytest.raises(TPUKernelError, match="expected 6 integers"):
        grouped_matmul(lhs, rhs, sizes[1:])
    with pytest.raises(TPUKernelError, match="they must be the same"):
        grouped_matmul(lhs.astype(jnp.bfloat16), rhs, sizes)

"""The grouped matmul of an NVIDIA GPU: interpreted here, against the reference in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpukit.errors import TPUKernelError
from tpukit.kernels.ops.grouped_matmul import triton_gpu
from tpukit.kernels.ops.grouped_matmul.api import grouped_matmul

ROWS, INNER, COLUMNS, GROUPS = 64, 32, 48, 4
SMALL = triton_gpu.Tiles(rows=16, columns=16, depth=16)


def exact(lhs, rhs, cotangent, sizes):
    """Result and gradients, group by group."""
    lhs, rhs, cotangent = (np.asarray(array, np.float64) for array in (lhs, rhs, cotangent))
    out, d_lhs, d_rhs = np.zeros((ROWS, COLUMNS)), np.zeros_like(lhs), np.zeros_like(rhs)
    start = 0
    for group, size in enumerate(sizes):
        part = slice(start, start + size)
        out[part] = lhs[part] @ rhs[group]
        d_lhs[part] = cotangent[part] @ rhs[group].T
        d_rhs[group] = lhs[part].T @ cotangent[part]
        start += size
    return out, d_lhs, d_rhs


@pytest.mark.parametrize(
    "sizes",
    [
        (16, 16, 16, 16),
        (0, 40, 5, 3),  # a group without rows, tiles of several groups, rows of nobody
        (1, 2, 3, 58),
        (0, 0, 0, 0),
    ],
)
def test_products_and_gradients_are_those_of_each_group(sizes):
    keys = jax.random.split(jax.random.key(0), 3)
    lhs = jax.random.normal(keys[0], (ROWS, INNER))
    rhs = jax.random.normal(keys[1], (GROUPS, INNER, COLUMNS))
    cotangent = jax.random.normal(keys[2], (ROWS, COLUMNS))
    if sum(sizes) < ROWS:  # what nobody's rows hold must not matter
        lhs, cotangent = (x.at[sum(sizes) :].set(jnp.nan) for x in (lhs, cotangent))
    counts = jnp.array(sizes)
    how = {"tiles": SMALL, "interpret": True}
    found = (
        triton_gpu.rows_times_weights(lhs, rhs, counts, **how),
        triton_gpu.rows_times_weights(cotangent, rhs, counts, is_transposed=True, **how),
        triton_gpu.rows_times_rows(lhs, cotangent, counts, **how),
    )
    for one, wanted in zip(found, exact(lhs, rhs, cotangent, sizes), strict=True):
        np.testing.assert_allclose(one, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("columns", "is_ours"), [(512, True), (192, False)])
def test_a_gpu_gets_the_kernels_where_tiles_are_whole(columns, is_ours):
    arrays = (
        jax.ShapeDtypeStruct((256, 256), jnp.bfloat16),
        jax.ShapeDtypeStruct((4, 256, columns), jnp.bfloat16),
        jax.ShapeDtypeStruct((4,), jnp.int32),
    )

    def total(lhs, rhs, sizes):
        return grouped_matmul(lhs, rhs, sizes).astype(jnp.float32).sum()

    traced = jax.jit(jax.grad(total, (0, 1))).trace(*arrays)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert ("grouped_matmul_weights" in text and "triton" in text) == is_ours


def test_asked_for_by_name_it_says_which_shapes_it_takes():
    lhs, rhs = jnp.ones((100, 256), jnp.bfloat16), jnp.ones((2, 256, 256), jnp.bfloat16)
    with pytest.raises(TPUKernelError, match="multiples of 128"):
        grouped_matmul(lhs, rhs, jnp.array([50, 50]), implementation="triton")

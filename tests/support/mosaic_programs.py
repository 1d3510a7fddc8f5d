"""Mosaic programs of kernels lowered for a TPU on this machine; no compiler takes part."""

import re

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpukit.hardware.target import target_chip

PRODUCT = 2 * 128**3  # FLOPs of two blocks of 128 x 128
_BLOCK = pl.BlockSpec((128, 128), lambda *_: (0, 0))
_BODY = re.compile(r"\\22body\\22: \\22([\w+/=]+)\\22")


def programs_of(function, *arguments):
    """The program of every kernel that a function calls on a TPU, in order."""
    with target_chip("v6e"):
        lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=("tpu",))
    return _BODY.findall(str(lowered.as_text()))


def program_of(kernel, *, grid, tables=0):
    """The program of a kernel on two square matrices, after as many tables as it has."""
    matrix = jax.ShapeDtypeStruct((128, 128), jnp.float32)
    table = jax.ShapeDtypeStruct((grid[0],), jnp.int32)
    call = pl.pallas_call(
        kernel,
        out_shape=matrix,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=tables, grid=grid, in_specs=[_BLOCK, _BLOCK], out_specs=_BLOCK
        ),
    )
    return programs_of(call, *[table] * tables, matrix, matrix)[0]


def multiply_where_listed(table, a, b, out):
    """A kernel that multiplies where its table says more than two."""

    @pl.when(table[pl.program_id(0)] > 2)
    def _():
        out[...] = jnp.dot(a[...], b[...])

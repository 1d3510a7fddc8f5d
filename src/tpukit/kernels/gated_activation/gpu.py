"""The gradient of a gated activation on an NVIDIA GPU: both halves in one pass.

XLA computes the halves one by one, reading gate and cotangent twice, and then copies them side by
side; of all elementwise work in a transformer this is the most bytes.
"""

from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from ..triton_blocks import dividing_columns
from .reference import gradients

WIDEST = 8192  # columns of one program
_WARPS = 8


def fits(both: jax.Array) -> bool:
    """Whether the kernel takes rows of this width."""
    return dividing_columns(both.shape[-1] // 2, most=WIDEST) >= 256


def backward(both: jax.Array, cotangent: jax.Array, *, interpret: bool = False) -> tuple[jax.Array]:
    """The gradient of gate and value side by side."""
    width = cotangent.shape[-1]
    rows, columns = cotangent.size // width, dividing_columns(width, most=WIDEST)
    pair = pl.BlockSpec((1, 2, columns), lambda i, j: (i, 0, j))
    call: Any = pl.pallas_call(
        _kernel,
        grid=(rows, width // columns),
        in_specs=[pair, pl.BlockSpec((1, columns), lambda i, j: (i, j))],
        out_specs=pair,
        out_shape=jax.ShapeDtypeStruct((rows, 2, width), both.dtype),
        input_output_aliases={0: 0},  # the largest activation is not needed any more
        compiler_params=triton.CompilerParams(num_warps=_WARPS),
        interpret=interpret,
        name="gated_activation_backward",
    )
    d_both = call(both.reshape(rows, 2, width), cotangent.reshape(rows, width))
    return (d_both.reshape(both.shape),)


def _kernel(both_ref: Any, d_ref: Any, d_both_ref: Any) -> None:
    d_gate, d_value = gradients(both_ref[0, 0, :], both_ref[0, 1, :], d_ref[0, :])
    d_both_ref[0, 0, :] = d_gate.astype(d_both_ref.dtype)
    d_both_ref[0, 1, :] = d_value.astype(d_both_ref.dtype)

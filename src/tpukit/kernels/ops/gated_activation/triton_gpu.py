"""A gated activation and its gradient on an NVIDIA GPU: both halves in one pass.

Of all elementwise work in a transformer this is the most bytes. XLA computes the halves of the
gradient one by one, reading gate and cotangent twice, and then copies them side by side; its
forward pass is kept from the memory's speed by the chip's power limit (H200: 427 us, here 375).
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from ...blocks.tiling import dividing_columns
from .reference import gradients

WIDEST = 8192  # columns of one program
_WARPS = 8


def fits(both: jax.Array) -> bool:
    """Whether the kernel takes rows of this width."""
    return dividing_columns(both.shape[-1] // 2, most=WIDEST) >= 256


def forward(both: jax.Array, *, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """The product; its gradient needs both factors."""
    width = both.shape[-1] // 2
    rows, columns = both.size // (2 * width), dividing_columns(width, most=WIDEST)
    call: Any = pl.pallas_call(
        _forward_kernel,
        grid=(rows, width // columns),
        in_specs=[pl.BlockSpec((1, 2, columns), lambda i, j: (i, 0, j))],
        out_specs=pl.BlockSpec((1, columns), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((rows, width), both.dtype),
        compiler_params=triton.CompilerParams(num_warps=_WARPS),
        interpret=interpret,
        name="gated_activation_forward",
    )
    return call(both.reshape(rows, 2, width)).reshape(*both.shape[:-1], width), both


def backward(both: jax.Array, cotangent: jax.Array, *, interpret: bool = False) -> tuple[jax.Array]:
    """The gradient of gate and value side by side."""
    width = cotangent.shape[-1]
    rows, columns = cotangent.size // width, dividing_columns(width, most=WIDEST)
    pair = pl.BlockSpec((1, 2, columns), lambda i, j: (i, 0, j))
    call: Any = pl.pallas_call(
        _backward_kernel,
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


def _forward_kernel(both_ref: Any, out_ref: Any) -> None:
    gate, value = (both_ref[0, half, :].astype(jnp.float32) for half in range(2))
    out_ref[0, :] = (jax.nn.silu(gate) * value).astype(out_ref.dtype)


def _backward_kernel(both_ref: Any, d_ref: Any, d_both_ref: Any) -> None:
    d_gate, d_value = gradients(both_ref[0, 0, :], both_ref[0, 1, :], d_ref[0, :])
    d_both_ref[0, 0, :] = d_gate.astype(d_both_ref.dtype)
    d_both_ref[0, 1, :] = d_value.astype(d_both_ref.dtype)

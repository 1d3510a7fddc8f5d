"""The residual norm on an NVIDIA GPU: each pass reads and writes every row once.

XLA makes two passes over the rows in each direction, because a fusion cannot use a row's sum in
the row itself. A row is a program here; the gradient of the scale is summed over the rows of a
program and then over programs.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

ROWS_PER_PROGRAM = 16  # of the backward pass: few partial sums, still many programs
_WARPS = 8


def fits(x: jax.Array) -> bool:
    """Whether the kernels take rows of this shape."""
    width = x.shape[-1]
    return width % 128 == 0 and width <= 16384 and (x.size // width) % ROWS_PER_PROGRAM == 0


def forward(
    x: jax.Array,
    delta: jax.Array | None,
    scale: jax.Array,
    *,
    eps: float,
    interpret: bool = False,
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    """The new stream and its norm, and what the backward pass needs."""
    width = x.shape[-1]
    rows = x.size // width
    row = pl.BlockSpec((1, _padded(width)), lambda i: (i, 0))
    line = pl.BlockSpec((1, _padded(width)), lambda i: (0, 0))
    out = jax.ShapeDtypeStruct((rows, width), x.dtype)
    adds = delta is not None
    arrays = [x.reshape(rows, width)] + ([delta.reshape(rows, width)] if adds else [])
    call: Any = pl.pallas_call(
        partial(_forward_row, width=width, eps=eps, adds=adds),
        grid=(rows,),
        in_specs=[row] * len(arrays) + [line],
        out_specs=[row, row] if adds else [row],
        out_shape=[out, out] if adds else [out],
        compiler_params=triton.CompilerParams(num_warps=_WARPS),
        interpret=interpret,
        name="residual_norm_forward",
    )
    *stream, normed = (y.reshape(x.shape) for y in call(*arrays, scale.astype(jnp.float32)[None]))
    kept = stream[0] if adds else x
    return (kept, normed), (kept, scale)


def backward(
    residuals: tuple[jax.Array, jax.Array],
    cotangent: tuple[jax.Array, jax.Array],
    *,
    eps: float,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of the stream, of what was added to it, and of the scale."""
    stream, scale = residuals
    width = stream.shape[-1]
    rows = stream.size // width
    programs = rows // ROWS_PER_PROGRAM
    many = pl.BlockSpec((ROWS_PER_PROGRAM, _padded(width)), lambda i: (i, 0))
    line = pl.BlockSpec((1, _padded(width)), lambda i: (0, 0))
    one = pl.BlockSpec((1, _padded(width)), lambda i: (i, 0))
    call: Any = pl.pallas_call(
        partial(_backward_rows, width=width, eps=eps),
        grid=(programs,),
        in_specs=[many, many, many, line],
        out_specs=[many, one],
        out_shape=[
            jax.ShapeDtypeStruct((rows, width), stream.dtype),
            jax.ShapeDtypeStruct((programs, width), jnp.float32),
        ],
        compiler_params=triton.CompilerParams(num_warps=_WARPS),
        interpret=interpret,
        name="residual_norm_backward",
    )
    flat = [y.reshape(rows, width) for y in (stream, *cotangent)]
    d_x, partial_sums = call(*flat, scale.astype(jnp.float32)[None])
    total = d_x.reshape(stream.shape)
    return total, total, jnp.sum(partial_sums, axis=0).astype(scale.dtype)


def _padded(width: int) -> int:
    """Triton's blocks are powers of two."""
    return 1 << (width - 1).bit_length()


def _row(ref: Any, i: Any) -> Any:
    return ref.at[pl.ds(i, 1), :]


def _inside(width: int) -> jax.Array:
    return (jnp.arange(_padded(width)) < width)[None]


def _forward_row(*refs: Any, width: int, eps: float, adds: bool) -> None:
    inside = _inside(width)
    read = partial(triton.load, mask=inside, other=0)
    x_ref, *others = refs
    narrow = read(_row(x_ref, 0))
    if adds:
        delta_ref, scale_ref, stream_ref, normed_ref = others
        narrow = narrow + read(_row(delta_ref, 0))
        triton.store(_row(stream_ref, 0), narrow, mask=inside)
    else:
        scale_ref, normed_ref = others
    x = narrow.astype(jnp.float32)
    inverse = jax.lax.rsqrt(jnp.sum(x * x) / width + eps)
    normed = x * inverse * read(_row(scale_ref, 0))
    triton.store(_row(normed_ref, 0), normed.astype(normed_ref.dtype), mask=inside)


def _backward_rows(
    stream_ref: Any,
    d_stream_ref: Any,
    d_normed_ref: Any,
    scale_ref: Any,
    d_x_ref: Any,
    d_scale_ref: Any,
    *,
    width: int,
    eps: float,
) -> None:
    inside = _inside(width)
    read = partial(triton.load, mask=inside, other=0)
    scale = read(_row(scale_ref, 0))

    def one_row(i: jax.Array, d_scale: jax.Array) -> jax.Array:
        x = read(_row(stream_ref, i)).astype(jnp.float32)
        d_normed = read(_row(d_normed_ref, i)).astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.sum(x * x) / width + eps)
        unit, weighted = x * inverse, d_normed * scale
        along = jnp.sum(weighted * unit) / width
        d_x = (weighted - unit * along) * inverse
        total = d_x + read(_row(d_stream_ref, i)).astype(jnp.float32)
        triton.store(_row(d_x_ref, i), total.astype(d_x_ref.dtype), mask=inside)
        return d_scale + d_normed * unit

    start = jnp.zeros((1, _padded(width)), jnp.float32)
    d_scale = jax.lax.fori_loop(0, ROWS_PER_PROGRAM, one_row, start)
    triton.store(_row(d_scale_ref, 0), d_scale, mask=inside)

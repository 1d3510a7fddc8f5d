"""The residual norm on an NVIDIA GPU: each pass reads and writes every row once.

XLA makes two passes over the rows in each direction, because a fusion cannot use a row's sum in
the row itself. A row is a program here; the gradient of the scale is summed over the rows of a
program and then over programs.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

MOST_ROWS = 32  # of one program in the backward pass: few partial sums, still many programs
FEWEST_ROWS = 8
_WARPS = 8


def fits(x: jax.Array) -> bool:
    """Whether the kernels take rows of this shape."""
    width = x.shape[-1]
    return width % 128 == 0 and width <= 16384 and (x.size // width) % FEWEST_ROWS == 0


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
        out_specs=[row, row],
        out_shape=[out, out],
        # A stream that is not added to comes out as it went in. Passed through here, XLA does not
        # take it for something that the next product may add to in place, after a copy.
        input_output_aliases={} if adds else {0: 0},
        compiler_params=triton.CompilerParams(num_warps=_WARPS),
        interpret=interpret,
        name="residual_norm_forward",
    )
    stream, normed = (y.reshape(x.shape) for y in call(*arrays, scale.astype(jnp.float32)[None]))
    return (stream, normed), (stream, scale)


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
    together = math.gcd(rows, MOST_ROWS)
    programs = rows // together
    many = pl.BlockSpec((together, _padded(width)), lambda i: (i, 0))
    line = pl.BlockSpec((1, _padded(width)), lambda i: (0, 0))
    one = pl.BlockSpec((1, _padded(width)), lambda i: (i, 0))
    call: Any = pl.pallas_call(
        partial(_backward_rows, rows=together, width=width, eps=eps),
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


def _inside(width: int) -> jax.Array | None:
    return None if width == _padded(width) else (jnp.arange(_padded(width)) < width)[None]


def _reader(width: int) -> Callable[[Any], jax.Array]:
    inside = _inside(width)
    return partial(triton.load, mask=inside, other=None if inside is None else 0)


def _forward_row(*refs: Any, width: int, eps: float, adds: bool) -> None:
    inside, read = _inside(width), _reader(width)
    x_ref, *others = refs
    narrow = read(_row(x_ref, 0))
    if adds:
        delta_ref, scale_ref, stream_ref, normed_ref = others
        narrow = narrow + read(_row(delta_ref, 0))
        triton.store(_row(stream_ref, 0), narrow, mask=inside)
    else:
        scale_ref, _, normed_ref = others
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
    rows: int,
    width: int,
    eps: float,
) -> None:
    inside, read = _inside(width), _reader(width)
    scale = read(_row(scale_ref, 0))

    def read_row(i: Any) -> tuple[jax.Array, ...]:
        return tuple(read(_row(ref, i)) for ref in (stream_ref, d_stream_ref, d_normed_ref))

    def one_row(i: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        d_scale, *arrived = carry
        # Under way while this row's sums are waited for: a sixth of the pass (H200, 2048 wide).
        following = read_row(jnp.minimum(i + 1, rows - 1))
        x, d_stream, d_normed = (array.astype(jnp.float32) for array in arrived)
        weighted = d_normed * scale
        inverse = jax.lax.rsqrt(jnp.sum(x * x) / width + eps)
        along = jnp.sum(weighted * x) * inverse / width
        unit = x * inverse
        total = (weighted - unit * along) * inverse + d_stream
        triton.store(_row(d_x_ref, i), total.astype(d_x_ref.dtype), mask=inside)
        return (d_scale + d_normed * unit, *following)

    start = jnp.zeros((1, _padded(width)), jnp.float32)
    d_scale, *_ = jax.lax.fori_loop(0, rows, one_row, (start, *read_row(0)))
    triton.store(_row(d_scale_ref, 0), d_scale, mask=inside)

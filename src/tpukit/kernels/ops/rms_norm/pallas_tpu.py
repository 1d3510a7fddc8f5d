"""Norms over whole rows as Pallas kernels for TPU: each row is read once in each direction.

RMS norm is the plainest. Layer norm takes the mean away, and a residual norm adds something to the
rows first: both are made of the kernels here. The backward kernel computes mean and deviation again
from the row it must read anyway, so that the forward pass leaves nothing but its result.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ....hardware.target import current_target
from ...blocks.tiling import tile_shape, word_sublanes
from ...blocks.tuned import blocks_for
from ...blocks.vmem import vmem_limit_bytes
from .blocks import RowBlocks, matrix_shape, row_case, vmem_bytes

# Tiles of rows worked on together, so that one's sums across lanes hide behind another's; static
# timing on v6e found these the fastest of 1, 2 and 4.
FORWARD_TILES, BACKWARD_TILES = 4, 2
# Sums over rows are kept once for each half of them, which two cores of a chip can share.
PARTS = 2
Residuals = tuple[jax.Array, jax.Array | None]


@dataclass(frozen=True)
class RowNorm:
    """What to compute, and what profiles call it: `centred` takes the mean away first."""

    name: str
    eps: float
    centred: bool
    interpret: Any = False


def forward(
    x: jax.Array,
    scale: jax.Array | None = None,
    *,
    eps: float = 1e-6,
    blocks: RowBlocks | None = None,
    interpret: Any = False,
) -> tuple[jax.Array, Residuals]:
    """The result, and the arguments as residuals."""
    norm = RowNorm("rms_norm", eps=eps, centred=False, interpret=interpret)
    chosen = blocks_for("rms_norm", row_case(x), blocks)
    _, out = normalise(x, scale, None, norm=norm, blocks=chosen)
    return out, (x, scale)


def backward(
    residuals: Residuals,
    cotangent: jax.Array,
    *,
    eps: float = 1e-6,
    blocks: RowBlocks | None = None,
    interpret: Any = False,
) -> Residuals:
    """Gradients of x and scale."""
    x, scale = residuals
    norm = RowNorm("rms_norm", eps=eps, centred=False, interpret=interpret)
    chosen = blocks_for("rms_norm", row_case(x), blocks)
    dx, dscale, _ = normalise_backward(x, scale, cotangent, biased=False, norm=norm, blocks=chosen)
    return dx, dscale if scale is None or dscale is None else dscale.astype(scale.dtype)


def normalise(
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    *,
    norm: RowNorm,
    blocks: RowBlocks,
    added: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The rows of `x`, plus `added` where it is given, and those normalised.

    The last axis is normalised, times `scale`, plus `bias`.
    """
    rows, width = matrix_shape(x.shape)
    block, chunk = blocks.block_rows, _chunk(x, blocks, FORWARD_TILES)
    matrices = [a.reshape(rows, width) for a in (x, added) if a is not None]
    parameters = [p.reshape(1, width) for p in (scale, bias) if p is not None]

    def kernel(*refs: Any) -> None:
        read, written = refs[: len(matrices)], refs[len(matrices) + len(parameters) :]
        lines = list(refs[len(matrices) : len(matrices) + len(parameters)])
        scale_line = lines.pop(0)[...].astype(jnp.float32) if scale is not None else None
        bias_line = lines.pop(0)[...].astype(jnp.float32) if bias is not None else None

        def body(step: jax.Array, _: None) -> None:
            at = pl.ds(pl.multiple_of(step * chunk, chunk), chunk)
            stream = read[0][at, :]
            if added is not None:
                stream = stream.astype(jnp.float32) + read[1][at, :].astype(jnp.float32)
                stream = stream.astype(x.dtype)
                written[0][at, :] = stream
            centre = _centred(stream, norm)
            square = jnp.mean(centre * centre, axis=-1, keepdims=True)
            y = centre * jax.lax.rsqrt(square + norm.eps)
            y = y if scale_line is None else y * scale_line
            y = y if bias_line is None else y + bias_line
            written[-1][at, :] = y.astype(x.dtype)

        jax.lax.fori_loop(0, block // chunk, body, None)

    window = pl.BlockSpec((block, width), lambda i: (i, 0))
    line = pl.BlockSpec((1, width), lambda i: (0, 0))
    out = pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct((rows, width), x.dtype) for _ in matrices],
        grid=(pl.cdiv(rows, block),),
        in_specs=[*[window for _ in matrices], *[line for _ in parameters]],
        out_specs=[window for _ in matrices],
        compiler_params=_compiler_params(("parallel",), x, blocks, residual=added is not None),
        interpret=norm.interpret,
        name=norm.name,
    )(*matrices, *parameters)
    return (x if added is None else out[0].reshape(x.shape)), out[-1].reshape(x.shape)


def normalise_backward(
    x: jax.Array,
    scale: jax.Array | None,
    cotangent: jax.Array,
    *,
    biased: bool,
    norm: RowNorm,
    blocks: RowBlocks,
    beside: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Gradients of x, scale and bias (float32 sums over rows, None where there is none).

    What flows back to x `beside` the norm is added to its gradient.

    With d = cotangent * scale, c the (centred) row and y = c / deviation,
    dx = (d - mean(d) - y mean(d c) / deviation) / deviation; an RMS norm has no mean(d).
    """
    rows, width = matrix_shape(x.shape)
    block, chunk = blocks.block_rows, _chunk(x, blocks, BACKWARD_TILES)
    sublanes = word_sublanes()
    count = pl.cdiv(rows, block)
    parts = min(PARTS, count)
    steps = pl.cdiv(count, parts)
    rows_left_over = rows != parts * steps * block
    sums = int(scale is not None) + int(biased)
    matrices = [a.reshape(rows, width) for a in (x, cotangent, beside) if a is not None]
    lines = [] if scale is None else [scale.reshape(1, width)]

    def kernel(x_ref: Any, cotangent_ref: Any, *refs: Any) -> None:
        inputs, (dx_ref, *sum_refs) = refs[: -1 - sums], refs[-1 - sums :]
        scale_line = inputs[-1][...].astype(jnp.float32) if lines else None
        first_row = (pl.program_id(0) * steps + pl.program_id(1)) * block

        @pl.when(pl.program_id(1) == 0)
        def _() -> None:
            for ref in sum_refs:
                ref[...] = jnp.zeros(ref.shape, ref.dtype)

        def body(step: jax.Array, _: None) -> None:
            at = pl.ds(pl.multiple_of(step * chunk, chunk), chunk)
            given = cotangent_ref[at, :].astype(jnp.float32)
            d = given if scale_line is None else given * scale_line
            centre = _centred(x_ref[at, :], norm)
            # Both sums at once: summing across lanes takes long, and neither waits for the other.
            square = jnp.mean(centre * centre, axis=-1, keepdims=True)
            along = jnp.mean(d * centre, axis=-1, keepdims=True)
            inverse = jax.lax.rsqrt(square + norm.eps)
            if norm.centred:
                d = d - jnp.mean(d, axis=-1, keepdims=True)
            y = centre * inverse
            dx = inverse * (d - y * (inverse * along))
            if beside is not None:
                dx = dx + inputs[0][at, :].astype(jnp.float32)
            dx_ref[at, :] = dx.astype(dx_ref.dtype)
            summands = ([given * y] if scale is not None else []) + ([given] if biased else [])
            for ref, summand in zip(sum_refs, summands, strict=True):
                if rows_left_over:
                    # Rows beyond the last hold whatever was there before.
                    row = jax.lax.broadcasted_iota(jnp.int32, (chunk, 1), 0) + step * chunk
                    summand = jnp.where(row + first_row < rows, summand, 0.0)
                ref[...] += jnp.sum(summand.reshape(-1, sublanes, width), axis=0)

        jax.lax.fori_loop(0, block // chunk, body, None)

    # An odd number of blocks leaves a step over, which does the last block once more.
    window = pl.BlockSpec((block, width), lambda p, i: (jnp.minimum(p * steps + i, count - 1), 0))
    total = pl.BlockSpec((sublanes, width), lambda p, i: (p, 0))
    dx, *partial_sums = pl.pallas_call(
        kernel,
        out_shape=[
            jax.ShapeDtypeStruct((rows, width), x.dtype),
            *[jax.ShapeDtypeStruct((parts * sublanes, width), jnp.float32)] * sums,
        ],
        grid=(parts, steps),
        in_specs=[
            *[window for _ in matrices],
            *[pl.BlockSpec((1, width), lambda p, i: (0, 0)) for _ in lines],
        ],
        out_specs=[window, *[total] * sums],
        compiler_params=_compiler_params(
            ("parallel", "arbitrary"), x, blocks, residual=beside is not None
        ),
        interpret=norm.interpret,
        name=f"{norm.name}_backward",
    )(*matrices, *lines)
    summed = [jnp.sum(part, axis=0) for part in partial_sums]
    dbias = summed.pop() if biased else None
    dscale = summed.pop() if scale is not None else None
    return dx.reshape(x.shape), dscale, dbias


def _chunk(x: jax.Array, blocks: RowBlocks, tiles: int) -> int:
    return math.gcd(blocks.block_rows, tiles * tile_shape(x.dtype)[0])


def _centred(x: jax.Array, norm: RowNorm) -> jax.Array:
    """Rows in float32, without their mean where the norm takes it away."""
    wide = x.astype(jnp.float32)
    return wide - jnp.mean(wide, axis=-1, keepdims=True) if norm.centred else wide


def _compiler_params(
    semantics: tuple[Any, ...], x: jax.Array, blocks: RowBlocks, *, residual: bool
) -> Any:
    case = row_case(x, residual=residual)
    limit = vmem_limit_bytes(vmem_bytes(case, blocks), current_target())
    return pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=limit)

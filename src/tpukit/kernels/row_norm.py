"""Pallas kernels that normalise whole rows: each row is read from HBM once in each direction.

Layer norm and RMS norm differ by the mean alone. The backward kernel computes mean and deviation
again from the row it must read anyway, so that the forward pass leaves nothing but its result.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ..errors import TPUKernelError
from ..hardware.target import current_target
from .op import PALLAS_TPU, BlockSizes, KernelCase, shape_bucket
from .tiling import LANES, WORD_SUBLANES, round_up, tile_shape
from .vmem import vmem_capacity_bytes, vmem_limit_bytes

# Long enough to hide the start of a copy, short enough that the first one is not waited for long.
WINDOW_BYTES = 2 * 2**20
DTYPES = ("float32", "bfloat16")
# Tiles of rows worked on together, so that one's sums across lanes hide behind another's; static
# timing on v6e found these the fastest of 1, 2 and 4.
FORWARD_TILES, BACKWARD_TILES = 4, 2
# Sums over rows are kept once for each half of them, which two cores of a chip can share.
PARTS = 2


@dataclass(frozen=True)
class RowBlocks(BlockSizes):
    """How many rows one grid step normalises."""

    block_rows: int


@dataclass(frozen=True)
class RowNorm:
    """What to compute: `centred` takes the mean away first."""

    eps: float
    centred: bool
    interpret: Any = False


def row_case(x: Any) -> KernelCase:
    """The case of an array at hand, for choosing blocks."""
    return KernelCase("rows", (jax.ShapeDtypeStruct(x.shape, x.dtype),))


def bucket(case: KernelCase) -> str:
    """Rows and width decide: neither how the rows are stacked nor the parameters do."""
    x = case.arguments[0]
    matrix = jax.ShapeDtypeStruct(_matrix_shape(x.shape), x.dtype)
    return shape_bucket(KernelCase(case.name, (matrix,)))


def default_blocks(case: KernelCase, chip: str | None) -> RowBlocks:
    """Windows of about 2 MiB, fewer rows where the backward pass would not fit."""
    rows, width = _matrix_shape(case.arguments[0].shape)
    dtype = case.arguments[0].dtype
    step = tile_shape(dtype)[0]
    block = max(step, WINDOW_BYTES // _row_bytes(width, dtype) // step * step)
    block = min(block, round_up(rows, step))
    while block > step and vmem_bytes(case, RowBlocks(block)) > vmem_capacity_bytes(chip):
        block = max(step, block // 2 // step * step)
    return RowBlocks(block)


def block_space(case: KernelCase, chip: str) -> list[RowBlocks]:
    """Powers of two from one tile to all rows."""
    rows, _ = _matrix_shape(case.arguments[0].shape)
    step = tile_shape(case.arguments[0].dtype)[0]
    sizes = [step]
    while sizes[-1] < min(rows, 4096):
        sizes.append(sizes[-1] * 2)
    return [RowBlocks(size) for size in sizes]


def vmem_bytes(case: KernelCase, blocks: RowBlocks) -> int:
    """Of the backward pass, which takes more: three windows, and the sums over rows."""
    _, width = _matrix_shape(case.arguments[0].shape)
    window = blocks.block_rows * _row_bytes(width, case.arguments[0].dtype)
    lines = WORD_SUBLANES * round_up(width, LANES) * 4
    # The scale, and the sums for scale and bias: all double-buffered, as the windows are.
    return 2 * (3 * window + 3 * lines)


def check_arguments(
    op: str,
    x: jax.Array,
    parameters: tuple[jax.Array | None, ...],
    implementation: str | None,
    *,
    use_fused_ops: bool,
) -> None:
    """Refuse parameters of another width, and a kernel that is asked for and cannot be had.

    Raises:
        TPUKernelError: With what was seen and what is supported.
    """
    for parameter in parameters:
        if parameter is not None and parameter.shape != x.shape[-1:]:
            raise TPUKernelError(
                f"{op} of x {x.shape} takes parameters of the shape {x.shape[-1:]} and got "
                f"{parameter.shape}; they belong to the last axis."
            )
    if implementation is not None and not use_fused_ops:
        raise TPUKernelError(
            f"{op} was given implementation={implementation!r} and use_fused_ops=False; give one "
            "of the two."
        )
    if implementation == PALLAS_TPU and x.dtype not in DTYPES:
        raise TPUKernelError(
            f"The kernel of {op} takes {' or '.join(DTYPES)} and x is {x.dtype.name}; cast it, or "
            "use implementation='reference'."
        )


def fits(x: Any, chip: str | None) -> bool:
    """Whether the kernel takes such rows: their dtype, and one tile of them in VMEM."""
    if x.dtype not in DTYPES or not x.size:
        return False
    case = row_case(x)
    smallest = RowBlocks(tile_shape(x.dtype)[0])
    return vmem_bytes(case, smallest) <= vmem_capacity_bytes(chip)


def normalise(
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    *,
    norm: RowNorm,
    blocks: RowBlocks,
) -> jax.Array:
    """The last axis of `x`, normalised, times `scale`, plus `bias`."""
    rows, width = _matrix_shape(x.shape)
    block, chunk = blocks.block_rows, _chunk(x, blocks, FORWARD_TILES)
    parameters = [p.reshape(1, width) for p in (scale, bias) if p is not None]

    def kernel(x_ref: Any, *refs: Any) -> None:
        lines, out_ref = list(refs[:-1]), refs[-1]
        scale_line = lines.pop(0)[...].astype(jnp.float32) if scale is not None else None
        bias_line = lines.pop(0)[...].astype(jnp.float32) if bias is not None else None

        def body(step: jax.Array, _: None) -> None:
            at = pl.ds(pl.multiple_of(step * chunk, chunk), chunk)
            centre = _centred(x_ref[at, :], norm)
            square = jnp.mean(centre * centre, axis=-1, keepdims=True)
            y = centre * jax.lax.rsqrt(square + norm.eps)
            y = y if scale_line is None else y * scale_line
            y = y if bias_line is None else y + bias_line
            out_ref[at, :] = y.astype(out_ref.dtype)

        jax.lax.fori_loop(0, block // chunk, body, None)

    window = pl.BlockSpec((block, width), lambda i: (i, 0))
    line = pl.BlockSpec((1, width), lambda i: (0, 0))
    out = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((rows, width), x.dtype),
        grid=(pl.cdiv(rows, block),),
        in_specs=[window, *[line for _ in parameters]],
        out_specs=window,
        compiler_params=_compiler_params(("parallel",), x, blocks),
        interpret=norm.interpret,
        name="layer_norm" if norm.centred else "rms_norm",
    )(x.reshape(rows, width), *parameters)
    return out.reshape(x.shape)


def normalise_backward(
    x: jax.Array,
    scale: jax.Array | None,
    cotangent: jax.Array,
    *,
    biased: bool,
    norm: RowNorm,
    blocks: RowBlocks,
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Gradients of x, scale and bias (float32 sums over rows, None where there is none).

    With d = cotangent * scale, c the (centred) row and y = c / deviation,
    dx = (d - mean(d) - y mean(d c) / deviation) / deviation; an RMS norm has no mean(d).
    """
    rows, width = _matrix_shape(x.shape)
    block, chunk = blocks.block_rows, _chunk(x, blocks, BACKWARD_TILES)
    count = pl.cdiv(rows, block)
    parts = min(PARTS, count)
    steps = pl.cdiv(count, parts)
    rows_left_over = rows != parts * steps * block
    sums = int(scale is not None) + int(biased)

    def kernel(x_ref: Any, cotangent_ref: Any, *refs: Any) -> None:
        inputs, dx_ref, sum_refs = refs[: len(lines)], refs[len(lines)], refs[len(lines) + 1 :]
        scale_line = inputs[0][...].astype(jnp.float32) if inputs else None
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
            dx_ref[at, :] = dx.astype(dx_ref.dtype)
            summands = ([given * y] if scale is not None else []) + ([given] if biased else [])
            for ref, summand in zip(sum_refs, summands, strict=True):
                if rows_left_over:
                    # Rows beyond the last hold whatever was there before.
                    row = jax.lax.broadcasted_iota(jnp.int32, (chunk, 1), 0) + step * chunk
                    summand = jnp.where(row + first_row < rows, summand, 0.0)
                ref[...] += jnp.sum(summand.reshape(-1, WORD_SUBLANES, width), axis=0)

        jax.lax.fori_loop(0, block // chunk, body, None)

    # An odd number of blocks leaves a step over, which does the last block once more.
    window = pl.BlockSpec((block, width), lambda p, i: (jnp.minimum(p * steps + i, count - 1), 0))
    lines = [] if scale is None else [scale.reshape(1, width)]
    total = pl.BlockSpec((WORD_SUBLANES, width), lambda p, i: (p, 0))
    dx, *partial_sums = pl.pallas_call(
        kernel,
        out_shape=[
            jax.ShapeDtypeStruct((rows, width), x.dtype),
            *[jax.ShapeDtypeStruct((parts * WORD_SUBLANES, width), jnp.float32)] * sums,
        ],
        grid=(parts, steps),
        in_specs=[window, window, *[pl.BlockSpec((1, width), lambda p, i: (0, 0)) for _ in lines]],
        out_specs=[window, *[total] * sums],
        compiler_params=_compiler_params(("parallel", "arbitrary"), x, blocks),
        interpret=norm.interpret,
        name="layer_norm_backward" if norm.centred else "rms_norm_backward",
    )(x.reshape(rows, width), cotangent.reshape(rows, width), *lines)
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


def _compiler_params(semantics: tuple[Any, ...], x: jax.Array, blocks: RowBlocks) -> Any:
    case = row_case(x)
    limit = vmem_limit_bytes(vmem_bytes(case, blocks), current_target())
    return pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=limit)


def _matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    return math.prod(shape[:-1]), shape[-1]


def _row_bytes(width: int, dtype: Any) -> int:
    return round_up(width, LANES) * jnp.dtype(dtype).itemsize

"""Norms over whole rows as Pallas kernels for TPU: each row is read once in each direction.

RMS norm and layer norm, which subtracts the mean first, share the kernels here. The backward kernel
recomputes mean and deviation from the row it reads anyway, so that the forward pass writes only its
result.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ....errors import TPUKernelError
from ....hardware import get_chip
from ....hardware.target import current_target
from ...blocks.tiling import LANES, Interpret, Ref, round_up, tile_shape, word_sublanes
from ...blocks.tuned import blocks_for
from ...blocks.vmem import vmem_capacity_bytes, vmem_limit_bytes
from ...registry.dispatch import Passes
from ...registry.op import PALLAS_TPU, BlockSizes, KernelCase, shape_bucket

# Long enough to hide the start of a copy, short enough to start soon on the first one.
WINDOW_BYTES = 2 * 2**20
LARGE_WINDOWS = 16  # with fewer, the first and the last window cost what large ones gain
DTYPES = ("float32", "bfloat16")
MANY_ROWS = 8192  # more rows have the same best blocks


@dataclass(frozen=True)
class RowBlocks(BlockSizes):
    """How many rows one grid step normalises."""

    block_rows: int


def row_case(x: Any) -> KernelCase:
    """Return the case of an array, for choosing blocks."""
    return KernelCase("rows", (jax.ShapeDtypeStruct(x.shape, x.dtype),))


def bucket(case: KernelCase) -> str:
    """Return the bucket by rows and width, whatever the leading shape and the parameters."""
    x = case.arguments[0]
    rows, width = matrix_shape(x.shape)
    matrix = jax.ShapeDtypeStruct((min(rows, MANY_ROWS), width), x.dtype)
    return shape_bucket(KernelCase(case.name, (matrix,)))


def default_blocks(case: KernelCase, chip: str | None) -> RowBlocks:
    """Return windows of 2 or 4 MiB, smaller where the backward pass would not fit."""
    rows, width = matrix_shape(case.arguments[0].shape)
    dtype = case.arguments[0].dtype
    step = tile_shape(dtype, chip)[0]
    stated = get_chip(chip).kernels.get("norm_window_bytes") if chip else None
    window = WINDOW_BYTES if stated is None else int(stated.require("the blocks of a norm"))
    if rows * _row_bytes(width, dtype) < LARGE_WINDOWS * window:
        window = WINDOW_BYTES
    block = max(step, window // _row_bytes(width, dtype) // step * step)
    block = min(block, round_up(rows, step))
    while block > step and vmem_bytes(case, RowBlocks(block)) > vmem_capacity_bytes(chip):
        block = max(step, block // 2 // step * step)
    return RowBlocks(block)


def block_space(case: KernelCase, chip: str) -> list[RowBlocks]:
    """Return powers of two from one tile to all rows."""
    rows, _ = matrix_shape(case.arguments[0].shape)
    step = tile_shape(case.arguments[0].dtype, chip)[0]
    sizes = [step]
    while sizes[-1] < min(rows, 4096):
        sizes.append(sizes[-1] * 2)
    return [RowBlocks(size) for size in sizes]


def vmem_bytes(case: KernelCase, blocks: RowBlocks) -> int:
    """Return the VMEM of the backward pass, the larger one: three windows and sums over rows."""
    _, width = matrix_shape(case.arguments[0].shape)
    window = blocks.block_rows * _row_bytes(width, case.arguments[0].dtype)
    lines = word_sublanes() * round_up(width, LANES) * 4
    # The scale, and the sums for scale and bias: all double-buffered, as the windows are.
    return 2 * 3 * (window + lines)


def check_arguments(
    op: str,
    x: jax.Array,
    parameters: tuple[jax.Array | None, ...],
    implementation: str | None,
    *,
    use_fused_ops: bool,
) -> None:
    """Refuse parameters of another width, and a named kernel that cannot take `x`.

    Raises:
        TPUKernelError: With the shapes or dtypes given and those supported.
    """
    for parameter in parameters:
        if parameter is not None and parameter.shape != x.shape[-1:]:
            raise TPUKernelError(
                f"{op} of x {x.shape} takes parameters of the shape {x.shape[-1:]}, but got "
                f"{parameter.shape}; they belong to the last axis."
            )
    if implementation is not None and not use_fused_ops:
        raise TPUKernelError(
            f"{op} got both implementation={implementation!r} and use_fused_ops=False; give only "
            "one of them."
        )
    if implementation == PALLAS_TPU and x.dtype not in DTYPES:
        raise TPUKernelError(
            f"The kernel of {op} takes {' or '.join(DTYPES)}, but x is {x.dtype.name}; cast it, or "
            "use implementation='reference'."
        )
    if implementation == PALLAS_TPU and x.size and not fits(x, current_target()):
        raise TPUKernelError(
            f"The kernel of {op} loads full rows, but {tile_shape(x.dtype)[0]} rows of "
            f"{x.shape[-1]} do not fit in the VMEM of {current_target() or 'every generation'}; "
            "use implementation='reference'."
        )


def fits(x: Any, chip: str | None) -> bool:
    """Whether the kernel takes such rows: a supported dtype, and one tile of rows in VMEM."""
    if x.dtype not in DTYPES or not x.size:
        return False
    smallest = RowBlocks(tile_shape(x.dtype, chip)[0])
    return vmem_bytes(row_case(x), smallest) <= vmem_capacity_bytes(chip)


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the number of rows and the width, whatever the leading shape."""
    return math.prod(shape[:-1]), shape[-1]


def _row_bytes(width: int, dtype: Any) -> int:
    return round_up(width, LANES) * jnp.dtype(dtype).itemsize


# Tiles of rows per loop step, so that the sums across lanes of different tiles overlap; static
# timing on v6e found these the fastest of 1, 2 and 4.
FORWARD_TILES, BACKWARD_TILES = 4, 2
# Sums over rows are kept per half of the rows, so that two cores of a chip share the work.
PARTS = 2
Residuals = tuple[Any, ...]  # x and its parameters, some of which may be None


@dataclass(frozen=True)
class RowNorm:
    """The norm to compute, and its name in profiles; `centred` subtracts the mean first."""

    name: str
    eps: float
    centred: bool
    interpret: Interpret = False


def row_norm_passes(name: str, *, centred: bool, eps: float) -> Passes:
    """Return both passes of a norm of x with a scale and, for some norms, a bias.

    Args:
        name: The op's name.
        centred: Whether to subtract the mean first.
        eps: Default of the option `eps`, which is added to the mean square.
    """

    def forward(
        x: jax.Array,
        *parameters: jax.Array | None,
        eps: float = eps,
        blocks: RowBlocks | None = None,
        interpret: Interpret = False,
    ) -> tuple[jax.Array, Residuals]:
        norm = RowNorm(name, eps=eps, centred=centred, interpret=interpret)
        chosen = blocks_for(name, row_case(x), blocks)
        scale, bias = _scale_and_bias(parameters)
        return normalise(x, scale, bias, norm=norm, blocks=chosen), (x, *parameters)

    def backward(
        residuals: Residuals,
        cotangent: jax.Array,
        *,
        eps: float = eps,
        blocks: RowBlocks | None = None,
        interpret: Interpret = False,
    ) -> Residuals:
        x, *parameters = residuals
        norm = RowNorm(name, eps=eps, centred=centred, interpret=interpret)
        chosen = blocks_for(name, row_case(x), blocks)
        scale, bias = _scale_and_bias(parameters)
        dx, *sums = normalise_backward(
            x, scale, cotangent, biased=bias is not None, norm=norm, blocks=chosen
        )
        gradients = (
            None if parameter is None or total is None else total.astype(parameter.dtype)
            for parameter, total in zip(parameters, sums, strict=False)
        )
        return dx, *gradients

    return Passes(forward, backward)


def _scale_and_bias(
    parameters: Sequence[jax.Array | None],
) -> tuple[jax.Array | None, jax.Array | None]:
    scale, bias, *_ = (*parameters, None, None)
    return scale, bias


def normalise(
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    *,
    norm: RowNorm,
    blocks: RowBlocks,
) -> jax.Array:
    """Normalise the last axis of `x`, times `scale`, plus `bias`."""
    rows, width = matrix_shape(x.shape)
    block, chunk = blocks.block_rows, _chunk(x, blocks, FORWARD_TILES)
    parameters = [p.reshape(1, width) for p in (scale, bias) if p is not None]

    def kernel(x_ref: Ref, *refs: Ref) -> None:
        *lines, out_ref = refs
        scale_line = lines.pop(0)[...].astype(jnp.float32) if scale is not None else None
        bias_line = lines.pop(0)[...].astype(jnp.float32) if bias is not None else None

        def body(step: jax.Array, _: None) -> None:
            at = pl.ds(pl.multiple_of(step * chunk, chunk), chunk)
            centre = _centred(x_ref[at, :], norm)
            square = jnp.mean(centre * centre, axis=-1, keepdims=True)
            y = centre * jax.lax.rsqrt(square + norm.eps)
            y = y if scale_line is None else y * scale_line
            y = y if bias_line is None else y + bias_line
            out_ref[at, :] = y.astype(x.dtype)

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
        name=norm.name,
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
    """Return the gradients of x, scale and bias: float32 sums over rows, None for a missing one.

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
    matrices = [x.reshape(rows, width), cotangent.reshape(rows, width)]
    lines = [] if scale is None else [scale.reshape(1, width)]

    def kernel(x_ref: Ref, cotangent_ref: Ref, *refs: Ref) -> None:
        inputs, (dx_ref, *sum_refs) = refs[: -1 - sums], refs[-1 - sums :]
        scale_line = inputs[0][...].astype(jnp.float32) if lines else None
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
            # Both sums at once, because a sum across lanes takes long and neither needs the other.
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
                    # Rows past the end have undefined values.
                    row = jax.lax.broadcasted_iota(jnp.int32, (chunk, 1), 0) + step * chunk
                    summand = jnp.where(row + first_row < rows, summand, 0.0)
                ref[...] += jnp.sum(summand.reshape(-1, sublanes, width), axis=0)

        jax.lax.fori_loop(0, block // chunk, body, None)

    # An odd number of blocks leaves one step over, which repeats the last block.
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
        compiler_params=_compiler_params(("parallel", "arbitrary"), x, blocks),
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
    """Return rows in float32, without their mean if the norm is centred."""
    wide = x.astype(jnp.float32)
    return wide - jnp.mean(wide, axis=-1, keepdims=True) if norm.centred else wide


def _compiler_params(semantics: tuple[Any, ...], x: jax.Array, blocks: RowBlocks) -> Any:
    limit = vmem_limit_bytes(vmem_bytes(row_case(x), blocks), current_target())
    return pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=limit)

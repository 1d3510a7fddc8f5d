"""`residual_norm`: an RMS norm with the addition before it, as Triton kernels on an NVIDIA GPU.

Each kernel reads and writes every row once. XLA makes two passes over the rows in each direction,
because a fusion cannot use a row's sum in the row itself. One program handles one row; the gradient
of the scale is summed over the rows of a program and then over programs. On a TPU, XLA fuses the
norm into its neighbours and shards it over any mesh.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from ...errors import TPUKernelError
from ..blocks.tiling import Ref
from ..partition.splits import Splits
from ..registry.dispatch import Passes, dispatch_with_gradient
from ..registry.op import REFERENCE, TRITON
from .rms_norm.api import plain_rms_norm

MOST_ROWS = 32  # of one program in the backward pass: few partial sums, still many programs
FEWEST_ROWS = 8
_WARPS = 8


def residual_norm(
    x: jax.Array,
    delta: jax.Array | None,
    scale: jax.Array,
    *,
    eps: float = 1e-6,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Add `delta` to the residual stream `x`; return the stream and its RMS norm.

    The stream is returned too because its own gradient is added in the same pass as the gradient
    of the norm.

    Args:
        x: (…, width), the residual stream.
        delta: Output of a block to add, of the shape and dtype of x; None adds nothing.
        scale: (width,).
        eps: Added to the mean square.
        implementation: "triton" or "reference"; None takes the kernel on an NVIDIA GPU where it
            supports rows of this shape, and XLA elsewhere.

    Raises:
        TPUKernelError: Shapes or dtypes do not match, or there is no such implementation.
    """
    if scale.shape != x.shape[-1:]:
        raise TPUKernelError(
            f"residual_norm of x {x.shape} takes a scale of the shape {x.shape[-1:]}, but got "
            f"{scale.shape}."
        )
    if delta is not None and (delta.shape, delta.dtype) != (x.shape, x.dtype):
        raise TPUKernelError(
            f"residual_norm adds delta to x {x.dtype.name}{list(x.shape)}, but got "
            f"{delta.dtype.name}{list(delta.shape)}; reshape or cast it."
        )
    return dispatch_with_gradient(
        "residual_norm",
        PASSES,
        x,
        delta,
        scale,
        splits=SPLITS,
        implementation=implementation,
        on_tpu=REFERENCE,
        on_gpu=TRITON if has_kernel(x) else REFERENCE,
        options={"eps": eps},
    )


def forward(
    x: jax.Array, delta: jax.Array | None, scale: jax.Array, *, eps: float
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    """Return the new stream and its norm, and the residuals: the stream and the scale."""
    stream = x if delta is None else x + delta
    return (stream, plain_rms_norm(stream, scale, eps=eps)), (stream, scale)


def backward(
    residuals: tuple[jax.Array, jax.Array], cotangent: tuple[jax.Array, jax.Array], *, eps: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of the stream, of delta and of the scale."""
    d_stream, d_normed = cotangent
    _, pull = jax.vjp(lambda x, scale: plain_rms_norm(x, scale, eps=eps), *residuals)
    d_x, d_scale = pull(d_normed)
    total = d_stream + d_x
    return total, total, d_scale


def has_kernel(x: jax.Array) -> bool:
    """Whether the Triton kernels support rows of this shape."""
    width = x.shape[-1]
    return width % 128 == 0 and width <= 16384 and (x.size // width) % FEWEST_ROWS == 0


def triton_forward(
    x: jax.Array,
    delta: jax.Array | None,
    scale: jax.Array,
    *,
    eps: float,
    interpret: bool = False,
) -> tuple[tuple[jax.Array, jax.Array], Any]:
    """Return the new stream and its norm, and the residuals."""
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
        # Without delta the stream is returned unchanged. As an alias of the input, XLA does not
        # copy it so that the next matmul can add to it in place.
        input_output_aliases={} if adds else {0: 0},
        compiler_params=triton.CompilerParams(num_warps=_WARPS),
        interpret=interpret,
        name="residual_norm_forward",
    )
    stream, normed = (y.reshape(x.shape) for y in call(*arrays, scale.astype(jnp.float32)[None]))
    return (stream, normed), (stream, scale)


def triton_backward(
    residuals: tuple[jax.Array, jax.Array],
    cotangent: tuple[jax.Array, jax.Array],
    *,
    eps: float,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of the stream, of delta and of the scale."""
    stream, scale = residuals
    width = stream.shape[-1]
    rows = stream.size // width
    together = math.gcd(rows, MOST_ROWS)
    programs = rows // together
    many = pl.BlockSpec((together, _padded(width)), lambda i: (i, 0))
    line = pl.BlockSpec((1, _padded(width)), lambda i: (0, 0))
    own_line = pl.BlockSpec((1, _padded(width)), lambda i: (i, 0))
    call: Any = pl.pallas_call(
        partial(_backward_rows, rows=together, width=width, eps=eps),
        grid=(programs,),
        in_specs=[many, many, many, line],
        out_specs=[many, own_line],
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


PASSES = {
    TRITON: Passes(triton_forward, triton_backward),
    REFERENCE: Passes(forward, backward),
}
# Rows are normalised one by one, so any leading dimension may be sharded.
SPLITS = Splits(
    free="...",
    arguments=("... d", "... d", "d"),
    result=("... d", "... d"),
    residuals=("... d", "d"),
)


def _padded(width: int) -> int:
    """Round up to a power of two, as Triton's blocks must be."""
    return 1 << (width - 1).bit_length()


def _row(ref: Ref, i: Any) -> Any:
    return ref.at[pl.ds(i, 1), :]


def _inside(width: int) -> jax.Array | None:
    return None if width == _padded(width) else (jnp.arange(_padded(width)) < width)[None]


def _reader(width: int) -> Callable[[Any], jax.Array]:
    inside = _inside(width)
    return partial(triton.load, mask=inside, other=None if inside is None else 0)


def _forward_row(*refs: Ref, width: int, eps: float, adds: bool) -> None:
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
    stream_ref: Ref,
    d_stream_ref: Ref,
    d_normed_ref: Ref,
    scale_ref: Ref,
    d_x_ref: Ref,
    d_scale_ref: Ref,
    *,
    rows: int,
    width: int,
    eps: float,
) -> None:
    inside, read = _inside(width), _reader(width)
    scale = read(_row(scale_ref, 0))

    def read_row(i: Any) -> tuple[jax.Array, ...]:
        return tuple(read(_row(ref, i)) for ref in (stream_ref, d_stream_ref, d_normed_ref))

    def add_row(i: Any, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        d_scale, *arrived = carry
        # Loads while this row's sums are pending: saves a sixth of the pass (H200, 2048 wide).
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
    d_scale, *_ = jax.lax.fori_loop(0, rows, add_row, (start, *read_row(0)))
    triton.store(_row(d_scale_ref, 0), d_scale, mask=inside)

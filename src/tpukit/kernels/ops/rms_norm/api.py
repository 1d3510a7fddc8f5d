"""`rms_norm`: fused on TPU, XLA's own elsewhere."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ....hardware.target import current_target
from ...partition.splits import Splits
from ...registry.dispatch import Passes, dispatch_with_gradient, recomputed, with_gradient
from ...registry.op import PALLAS_TPU, REFERENCE, KernelCase, Op
from .pallas_tpu import (
    RowBlocks,
    block_space,
    bucket,
    check_arguments,
    default_blocks,
    fits,
    row_norm_passes,
    vmem_bytes,
)


def plain_rms_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    *,
    eps: float = 1e-6,
) -> jax.Array:
    """Normalise the last axis to mean square 1, in float32 or wider."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    if scale is not None:
        wide = wide * scale
    return wide.astype(x.dtype)


OP_NAME = "rms_norm"
PASSES = {
    PALLAS_TPU: row_norm_passes(OP_NAME, centred=False, eps=1e-6),
    REFERENCE: recomputed(plain_rms_norm),
}
# Rows are normalised one by one, so any leading dimension may be sharded.
SPLITS = Splits(
    free="...",
    arguments=("... d", "d"),
    result="... d",
    residuals=("... d", "d"),
)


def rms_norm(
    x: jax.Array,
    scale: jax.Array | None = None,
    *,
    eps: float = 1e-6,
    use_fused_ops: bool = True,
    implementation: str | None = None,
    blocks: RowBlocks | None = None,
) -> jax.Array:
    """Normalise the last axis of `x` to mean square 1, computed in float32.

    Args:
        x: (…, width), any leading shape.
        scale: (width,), or None.
        eps: Added to the mean square.
        use_fused_ops: False takes XLA on every platform.
        implementation: "pallas_tpu" or "reference"; None takes the kernel on TPU where it
            supports rows of this width and dtype.
        blocks: Rows of a grid step; None takes the tuned ones.

    Raises:
        TPUKernelError: Scale is not (width,), or the named implementation cannot take x.
    """
    check_arguments(OP_NAME, x, (scale,), implementation, use_fused_ops=use_fused_ops)
    fused = use_fused_ops and fits(x, current_target())
    return dispatch_with_gradient(
        OP_NAME,
        PASSES,
        x,
        scale,
        splits=SPLITS,
        implementation=implementation,
        on_tpu=PALLAS_TPU if fused else REFERENCE,
        options={"eps": eps},
        pallas_options={"blocks": blocks},
    )


SHAPES = (
    (1024, 1024, "bfloat16"),
    (300, 1000, "float32"),
    (8192, 4096, "bfloat16"),
    (8192, 8192, "bfloat16"),
    (16384, 2048, "bfloat16"),
)


def norm_case(rows: int, width: int, dtype: str = "bfloat16", *, lines: int) -> KernelCase:
    """Return rows with `lines` float32 parameters of a row's width."""
    x = jax.ShapeDtypeStruct((rows, width), jnp.dtype(dtype))
    line = jax.ShapeDtypeStruct((width,), jnp.float32)
    return KernelCase(f"{dtype}_{rows}x{width}", (x, *[line] * lines))


def row_norm_op(
    name: str,
    function: Callable[..., Any],
    reference: Callable[..., Any],
    passes: Mapping[str, Passes],
    splits: Splits,
    *,
    lines: int,
) -> Op:
    """Return the op of a norm over rows, with the cases that both norms share."""
    return Op(
        name=name,
        function=function,
        implementations={
            PALLAS_TPU: with_gradient(name, passes, PALLAS_TPU, splits),
            REFERENCE: reference,
        },
        cases=tuple(norm_case(*shape, lines=lines) for shape in SHAPES),
        bucket=bucket,
        block_space=block_space,
        vmem_bytes=vmem_bytes,
        default_blocks=default_blocks,
        differentiable=tuple(range(1 + lines)),
        splits=splits,
    )


case = partial(norm_case, lines=1)
OP = row_norm_op(OP_NAME, rms_norm, plain_rms_norm, PASSES, SPLITS, lines=1)

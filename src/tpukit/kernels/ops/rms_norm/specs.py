"""The RMS-norm op, and what layer norm has in common with it: shapes, blocks, implementations."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from ...partition.splits import Splits
from ...registry.gradient import Passes, with_gradient
from ...registry.op import PALLAS_TPU, REFERENCE, KernelCase, Op
from . import reference
from .api import OP_NAME, PASSES, SPLITS, rms_norm
from .blocks import block_space, bucket, default_blocks, vmem_bytes

SHAPES = (
    (1024, 1024, "bfloat16"),
    (300, 1000, "float32"),
    (8192, 4096, "bfloat16"),
    (8192, 8192, "bfloat16"),
    (16384, 2048, "bfloat16"),
)


def norm_case(rows: int, width: int, dtype: str = "bfloat16", *, lines: int) -> KernelCase:
    """Rows, with `lines` float32 arrays of a row's width, as training keeps scale and bias."""
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
    """The op of a norm over rows, at the shapes both norms are judged by."""
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
OP = row_norm_op(OP_NAME, rms_norm, reference.rms_norm, PASSES, SPLITS, lines=1)

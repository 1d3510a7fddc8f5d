"""What layer norm and RMS norm have in common as ops: shapes, blocks and implementations."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from ..blocks.rows import block_space, bucket, default_blocks, vmem_bytes
from ..registry.dispatch import Passes, with_gradient
from ..registry.op import PALLAS_TPU, REFERENCE, KernelCase, Op

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
    *,
    lines: int,
) -> Op:
    """The op of a norm over rows, at the shapes both norms are judged by."""
    return Op(
        name=name,
        function=function,
        implementations={
            PALLAS_TPU: with_gradient(name, passes, PALLAS_TPU),
            REFERENCE: reference,
        },
        cases=tuple(norm_case(*shape, lines=lines) for shape in SHAPES),
        bucket=bucket,
        block_space=block_space,
        vmem_bytes=vmem_bytes,
        default_blocks=default_blocks,
        differentiable=tuple(range(1 + lines)),
    )

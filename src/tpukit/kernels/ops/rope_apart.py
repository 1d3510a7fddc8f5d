"""`rope_apart`: rotate queries and keys that one matmul gives side by side, and split them.

On an NVIDIA GPU one pass rotates both on their way to arrays of their own. The gradient goes back
into one array in the same way, which would be another pass with XLA.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from ..blocks.tiling import Ref
from ..partition.splits import Splits
from ..registry.dispatch import Passes, dispatch_with_gradient
from ..registry.op import REFERENCE, TRITON
from .rope import Table, rotate

Heads = tuple[int, int]  # of queries and keys
MOST_TOKENS = 16  # of one program, which keeps their sines and cosines for all heads
FEWEST_TOKENS = 4
_WARPS = 4


def rope_apart(
    joined: jax.Array, cos: Table, sin: Table, *, heads: Heads
) -> tuple[jax.Array, jax.Array]:
    """Return queries (B, S, H, D) and keys (B, S, KV, D), rotated as `rope` does.

    Args:
        joined: (B, S, (H + KV) * D), queries first.
        cos: (B, S, D / 2); tables have no gradient.
        sin: The same.
        heads: H and KV.
    """
    tokens = joined.shape[0] * joined.shape[1]
    return dispatch_with_gradient(
        "rope_apart",
        PASSES,
        joined,
        cos,
        sin,
        splits=SPLITS,
        on_tpu=REFERENCE,
        on_gpu=TRITON if has_kernel(tokens, 2 * cos.shape[-1]) else REFERENCE,
        options={"heads": heads},
    )


def forward(
    joined: jax.Array, cos: jax.Array, sin: jax.Array, *, heads: Heads
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """Return queries and keys, and the tables as residuals, in plain jnp."""
    all_heads = joined.reshape(*joined.shape[:2], sum(heads), -1)
    rotated = rotate(all_heads, cos, sin)
    return (rotated[:, :, : heads[0]], rotated[:, :, heads[0] :]), (cos, sin)


def backward(
    residuals: tuple[jax.Array, jax.Array],
    cotangent: tuple[jax.Array, jax.Array],
    *,
    heads: Heads,
) -> tuple[jax.Array, None, None]:
    """Return the gradients of queries and keys side by side; tables have none."""
    cos, sin = residuals
    rotated = rotate(jnp.concatenate(cotangent, axis=2), cos, -sin)
    return rotated.reshape(*rotated.shape[:2], -1), None, None


def has_kernel(tokens: int, head_dim: int) -> bool:
    """Whether the Triton kernels support this number of tokens and this head width."""
    half = head_dim // 2
    return tokens % FEWEST_TOKENS == 0 and half >= 16 and half & (half - 1) == 0


def triton_forward(
    joined: jax.Array, cos: jax.Array, sin: jax.Array, *, heads: Heads, interpret: bool = False
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """Return queries and keys, and the tables as residuals, in one pass."""
    batch, length, width = joined.shape
    half = width // sum(heads) // 2
    source = joined.reshape(batch * length, sum(heads), 2, half)
    q, k = _rotate_heads([source], heads, cos, sin, inverse=False, interpret=interpret)
    apart = (q.reshape(batch, length, -1, 2 * half), k.reshape(batch, length, -1, 2 * half))
    return apart, (cos, sin)


def triton_backward(
    residuals: tuple[jax.Array, jax.Array],
    cotangent: tuple[jax.Array, jax.Array],
    *,
    heads: Heads,
    interpret: bool = False,
) -> tuple[jax.Array, None, None]:
    """Return the gradients of queries and keys side by side, in one pass."""
    batch, length, _, head_dim = cotangent[0].shape
    apart = [part.reshape(batch * length, -1, 2, head_dim // 2) for part in cotangent]
    (joined,) = _rotate_heads(apart, (sum(heads),), *residuals, inverse=True, interpret=interpret)
    return joined.reshape(batch, length, sum(heads) * head_dim), None, None


PASSES = {
    TRITON: Passes(triton_forward, triton_backward),
    REFERENCE: Passes(forward, backward),
}
# A shard of the joined heads would have queries without their keys.
SPLITS = Splits(
    free="b s",
    arguments=("b s joined", "b s half", "b s half"),
    result=("b s q d", "b s k d"),
    residuals=("b s half", "b s half"),
)


def _rotate_heads(
    sources: list[jax.Array],
    out_heads: tuple[int, ...],
    cos: jax.Array,
    sin: jax.Array,
    *,
    inverse: bool,
    interpret: bool,
) -> list[jax.Array]:
    """Rotate the heads of all sources in order, into arrays of `out_heads` heads each."""
    tokens, _, _, half = sources[0].shape
    together = math.gcd(tokens, MOST_TOKENS)

    def block(heads: int) -> pl.BlockSpec:
        # The kernel loops over the heads, so their number need not be a power of two.
        return pl.BlockSpec((together, heads, 2, half), lambda i: (i, 0, 0, 0))

    table = pl.BlockSpec((together, half), lambda i: (i, 0))
    call: Any = pl.pallas_call(
        partial(_kernel, sources=len(sources), inverse=inverse),
        grid=(tokens // together,),
        in_specs=[*(block(source.shape[1]) for source in sources), table, table],
        out_specs=[block(heads) for heads in out_heads],
        out_shape=[
            jax.ShapeDtypeStruct((tokens, heads, 2, half), sources[0].dtype) for heads in out_heads
        ],
        compiler_params=triton.CompilerParams(num_warps=_WARPS),
        interpret=interpret,
        name="rope_backward" if inverse else "rope_forward",
    )
    return call(*sources, cos.reshape(tokens, half), sin.reshape(tokens, half))


def _kernel(*refs: Ref, sources: int, inverse: bool) -> None:
    inputs, (cos_ref, sin_ref, *outputs) = refs[:sources], refs[sources:]
    cos, sin = cos_ref[...], sin_ref[...]
    sin = -sin if inverse else sin
    read = [(ref, head) for ref in inputs for head in range(ref.shape[1])]
    written = [(ref, head) for ref in outputs for head in range(ref.shape[1])]
    for (source, read_head), (out, head) in zip(read, written, strict=True):
        first = source[:, read_head, 0, :].astype(jnp.float32)
        second = source[:, read_head, 1, :].astype(jnp.float32)
        out[:, head, 0, :] = (first * cos - second * sin).astype(out.dtype)
        out[:, head, 1, :] = (second * cos + first * sin).astype(out.dtype)

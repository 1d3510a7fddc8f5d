"""Rotary positions of queries and keys that stand side by side, on an NVIDIA GPU.

One product gives both, and one pass rotates them on their way to arrays of their own; the gradient
goes back into one array in the same way, for which XLA would make another pass.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from .reference import Heads

MOST_TOKENS = 16  # of one program, which keeps their sines and cosines for all heads
FEWEST_TOKENS = 4
_WARPS = 4


def fits(tokens: int, head_dim: int) -> bool:
    """Whether the kernels take so many tokens and heads of this width."""
    half = head_dim // 2
    return tokens % FEWEST_TOKENS == 0 and half >= 16 and half & (half - 1) == 0


def forward(
    joined: jax.Array, cos: jax.Array, sin: jax.Array, *, heads: Heads, interpret: bool = False
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    """Queries and keys, and the tables as residuals."""
    batch, length, width = joined.shape
    half = width // sum(heads) // 2
    source = joined.reshape(batch * length, sum(heads), 2, half)
    q, k = _rotate([source], heads, cos, sin, inverse=False, interpret=interpret)
    apart = (q.reshape(batch, length, -1, 2 * half), k.reshape(batch, length, -1, 2 * half))
    return apart, (cos, sin)


def backward(
    residuals: tuple[jax.Array, jax.Array],
    cotangent: tuple[jax.Array, jax.Array],
    *,
    heads: Heads,
    interpret: bool = False,
) -> tuple[jax.Array, None, None]:
    """The gradient of both, side by side; tables are data and have none."""
    batch, length, _, head_dim = cotangent[0].shape
    apart = [one.reshape(batch * length, -1, 2, head_dim // 2) for one in cotangent]
    (joined,) = _rotate(apart, (sum(heads),), *residuals, inverse=True, interpret=interpret)
    return joined.reshape(batch, length, sum(heads) * head_dim), None, None


def _rotate(
    sources: list[jax.Array],
    out_heads: tuple[int, ...],
    cos: jax.Array,
    sin: jax.Array,
    *,
    inverse: bool,
    interpret: bool,
) -> list[jax.Array]:
    """The heads of all sources in their order, rotated, in arrays of so many heads each."""
    tokens, _, _, half = sources[0].shape
    together = math.gcd(tokens, MOST_TOKENS)

    def block(heads: int) -> pl.BlockSpec:
        # Heads are walked through one by one, so their number need not be a power of two.
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


def _kernel(*refs: Any, sources: int, inverse: bool) -> None:
    inputs, (cos_ref, sin_ref, *outputs) = refs[:sources], refs[sources:]
    cos, sin = cos_ref[...], sin_ref[...]
    sin = -sin if inverse else sin
    read = [(ref, head) for ref in inputs for head in range(ref.shape[1])]
    written = [(ref, head) for ref in outputs for head in range(ref.shape[1])]
    for (source, of), (out, at) in zip(read, written, strict=True):
        first = source[:, of, 0, :].astype(jnp.float32)
        second = source[:, of, 1, :].astype(jnp.float32)
        out[:, at, 0, :] = (first * cos - second * sin).astype(out.dtype)
        out[:, at, 1, :] = (second * cos + first * sin).astype(out.dtype)

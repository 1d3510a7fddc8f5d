"""The arrays, block sizes and static settings of one attention call, and the kernels' layout."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...blocks.tiling import round_up
from ...registry.op import BlockSizes
from ..rope import RopeTables
from .spec import SegmentIds
from .visibility import Visibility

LANES = 128
LOG2_E = math.log2(math.e)
# A masked score is below the lowest maximum of a row, so that its weight is exactly 0, also in rows
# that attend to no key.
MASKED = -1e30
LOWEST_MAXIMUM = -0.5e30
# The weight of the highest score is 1, so a sum is either at least 1 or 0.
SMALLEST_SUM = 1e-30


@dataclass(frozen=True)
class FlashBlocks(BlockSizes):
    """Tokens of each block, multiples of 128.

    Attributes:
        block_q: Queries of one grid step of the forward kernel.
        block_kv: Keys and values in VMEM at a time, or all of them if there are fewer.
        block_kv_compute: Keys of one block of scores; it should divide `block_q`.
        unroll: Blocks of scores per loop iteration: more overlap, and a longer compile.
        backward_q: Queries in VMEM at a time in the backward kernel.
        backward_q_compute: Queries of one block of scores there; it should divide `backward_kv`.
        backward_kv: Keys of one grid step of the backward kernel.
    """

    block_q: int = 512
    block_kv: int = 2048
    block_kv_compute: int = 512
    unroll: int = 1
    backward_q: int = 2048
    backward_q_compute: int = 512
    backward_kv: int = 512

    def cut_to(self, visibility: Visibility) -> "FlashBlocks":
        """Return these blocks cut to the sequence lengths, the large ones as multiples."""
        q_tokens, kv_tokens = (round_up(n, LANES) for n in (visibility.q_len, visibility.kv_len))
        block_q, compute = min(self.block_q, q_tokens), min(self.block_kv_compute, kv_tokens)
        backward_kv = min(self.backward_kv, kv_tokens)
        backward_compute = min(self.backward_q_compute, q_tokens)
        if visibility.mask is not None:
            size = visibility.mask.block_size
            block_q = compute = backward_kv = backward_compute = size
        step = math.lcm(block_q, compute) if visibility.causal else compute
        backward_step = math.lcm(backward_kv, backward_compute)
        return FlashBlocks(
            block_q=block_q,
            block_kv=min(round_up(self.block_kv, step), round_up(kv_tokens, step)),
            block_kv_compute=compute,
            unroll=self.unroll,
            backward_q=min(
                round_up(self.backward_q, backward_step), round_up(q_tokens, backward_step)
            ),
            backward_q_compute=backward_compute,
            backward_kv=backward_kv,
        )


class AttentionArrays(NamedTuple):
    """The array arguments of one attention call, in the order of every implementation.

    Attributes:
        q: Queries (B, S, H, D).
        k: Keys (B, S, KV, D).
        v: Values (B, S, KV, Dv).
        segment_ids: Document numbers of packed sequences.
        rope: Cosines and sines that rotate queries and keys.
        dense_mask: Booleans that broadcast to (B, H, queries, keys).
        sinks: (H,) scores of one more key each, whose value is zero.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    segment_ids: SegmentIds | None = None
    rope: RopeTables | None = None
    dense_mask: jax.Array | None = None
    sinks: jax.Array | None = None


# Of q, k and v, then None for segment ids, RoPE tables and mask, and last of the sinks.
Gradients = tuple[jax.Array, jax.Array, jax.Array, None, None, None, jax.Array | None]


class Residuals(NamedTuple):
    """What both passes of an implementation share: arguments, result, log-sum-exp of each row."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    segment_ids: SegmentIds | None
    rope: RopeTables | None
    dense_mask: jax.Array | None
    sinks: jax.Array | None
    out: jax.Array
    lse: jax.Array

    @property
    def arrays(self) -> AttentionArrays:
        """The arguments."""
        return AttentionArrays(*self[:7])


@dataclass(frozen=True)
class Problem:
    """The static part of one call.

    Attributes:
        visibility: Which keys a query attends to, and both lengths.
        scale: Factor of the scores, before the cap.
        heads: Heads of the queries.
        kv_heads: Heads of keys and values.
        width: Width of one head of queries and keys, without padding.
        v_width: Width of one head of values and of the result.
        dtype: Dtype of queries, keys and values.
        mask_rows: Rows of the mask in memory: one per query, one for all, or none.
    """

    visibility: Visibility
    scale: float
    heads: int
    kv_heads: int
    width: int
    v_width: int
    dtype: Any
    mask_rows: int = 0

    @property
    def soft_cap(self) -> float | None:
        """Bound of the scores, by a tanh."""
        return self.visibility.spec.soft_cap

    @property
    def group(self) -> int:
        """Query heads that share a key head."""
        return self.heads // self.kv_heads

    @property
    def padded_width(self) -> int:
        """The width of one head of queries and keys in kernels: full lanes."""
        return round_up(self.width, LANES)

    @property
    def padded_v_width(self) -> int:
        """The width of one head of values in kernels."""
        return round_up(self.v_width, LANES)

    @property
    def query_factor(self) -> float:
        """The factor of queries that makes scores ready for exp2 or for the cap."""
        return self.scale * LOG2_E if self.soft_cap is None else self.scale / self.soft_cap

    @property
    def precision(self) -> Any:
        """The precision of matmuls: float32 arrays are not rounded to bfloat16."""
        return jax.lax.Precision.HIGHEST if self.dtype == jnp.float32 else None


def to_rows(x: jax.Array, *, tokens: int) -> jax.Array:
    """Reshape (B, S, H, D) to (B, tokens, H * padded D), as projections write it: often no copy."""
    batch, length, heads, width = x.shape
    padding = round_up(width, LANES) - width
    if padding or tokens != length:
        x = jnp.pad(x, ((0, 0), (0, tokens - length), (0, 0), (0, padding)))
    return x.reshape(batch, tokens, heads * (width + padding))


def from_rows(x: jax.Array, *, tokens: int, heads: int, width: int) -> jax.Array:
    """Undo `to_rows`."""
    batch, length, _ = x.shape
    return x.reshape(batch, length, heads, -1)[:, :tokens, :, :width]


def pad_tokens(x: jax.Array, tokens: int, *, axis: int, fill: int = 0) -> jax.Array:
    """Append `fill` along `axis` up to `tokens`."""
    missing = tokens - x.shape[axis]
    if not missing:
        return x
    widths = [(0, missing if number == axis else 0) for number in range(x.ndim)]
    return jnp.pad(x, widths, constant_values=fill)


def matmul(a: Any, b: Any, *, contract: tuple[int, int], precision: Any) -> Any:
    """Multiply, summing in float32 over axis `contract[0]` of a and `contract[1]` of b."""
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return jax.lax.dot_general(
        a, b, dimensions, precision=precision, preferred_element_type=jnp.float32
    )

"""Ways to compute causal attention, behind one call so that a model can be given any of them."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from ..errors import TPUModelError, did_you_mean

# Above this length the full score matrix outweighs every other activation of a layer.
LONGEST_UNBLOCKED = 2048
QUERY_BLOCK = 512
SMALLEST_BLOCK = 64


class AttentionFunction(Protocol):
    """Causal attention of q (B, S, H, D) over k, v (B, S, KV, D) -> (B, S, H, D).

    `window` is how many keys back a query sees (None: all); `segment_ids` (B, S) keeps packed
    documents apart. The scale is `head_dim ** -0.5`.
    """

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        window: int | None = None,
        segment_ids: jax.Array | None = None,
    ) -> jax.Array:
        """Attend."""
        ...


def dot_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    window: int | None = None,
    segment_ids: jax.Array | None = None,
    implementation: str = "xla",
) -> jax.Array:
    """The whole score matrix at once, through `jax.nn.dot_product_attention`."""
    mask = None
    if segment_ids is not None:
        mask = (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
    call: Any = jax.nn.dot_product_attention
    return call(
        q,
        k,
        v,
        mask=mask,
        is_causal=True,
        local_window_size=None if window is None else (window - 1, 0),
        implementation=implementation,
    )


def blocked_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    window: int | None = None,
    segment_ids: jax.Array | None = None,
    block: int = QUERY_BLOCK,
) -> jax.Array:
    """One block of queries at a time, recomputed in the backward pass.

    The scores held at once are (block, S) instead of (S, S), or (block, window + block) with a
    window. Runs on every backend.
    """
    batch, length, heads, depth = q.shape
    block = math.gcd(length, block)
    if block < SMALLEST_BLOCK:
        raise TPUModelError(
            f"blocked attention needs a sequence length that is a multiple of {SMALLEST_BLOCK}, "
            f"not {length}; pad the sequence, or use attention='xla'."
        )
    segments = jnp.zeros((batch, length), jnp.int32) if segment_ids is None else segment_ids
    # Keys a block can see: everything, or its own span and one window before it.
    windowed = window is not None and window + block < length
    before = window if windowed and window is not None else 0
    reach = before + block if windowed else length
    k, v = (jnp.pad(x, ((0, 0), (before, 0), (0, 0), (0, 0))) for x in (k, v))
    key_segments = jnp.pad(segments, ((0, 0), (before, 0)))
    blocks = length // block
    q_blocks = jnp.moveaxis(q.reshape(batch, blocks, block, heads, depth), 1, 0)
    segment_blocks = jnp.moveaxis(segments.reshape(batch, blocks, block), 1, 0)
    starts = jnp.arange(blocks) * block

    @jax.checkpoint
    def one_block(inputs: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        q_block, q_segments, start = inputs
        first = start if windowed else 0
        seen_k, seen_v, seen_segments = (
            jax.lax.dynamic_slice_in_dim(x, first, reach, axis=1) for x in (k, v, key_segments)
        )
        rows = start + jnp.arange(block)[:, None]
        columns = first - before + jnp.arange(reach)[None, :]
        visible = (columns <= rows) & (columns >= 0)
        if window is not None:
            visible &= columns > rows - window
        mask = visible[None] & (q_segments[:, :, None] == seen_segments[:, None, :])
        call: Any = jax.nn.dot_product_attention
        return call(q_block, seen_k, seen_v, mask=mask[:, None], implementation="xla")

    out = jax.lax.map(one_block, (q_blocks, segment_blocks, starts))
    return jnp.moveaxis(out, 0, 1).reshape(batch, length, heads, depth)


def automatic_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    window: int | None = None,
    segment_ids: jax.Array | None = None,
) -> jax.Array:
    """`dot_attention` for short sequences, `blocked_attention` for long ones."""
    length = q.shape[1]
    blocks = length > LONGEST_UNBLOCKED and length % SMALLEST_BLOCK == 0
    choose = blocked_attention if blocks else dot_attention
    return choose(q, k, v, window=window, segment_ids=segment_ids)


_BY_NAME: dict[str, Callable[..., jax.Array]] = {
    "auto": automatic_attention,
    "xla": dot_attention,
    "blocked": blocked_attention,
    "cudnn": partial(dot_attention, implementation="cudnn"),
}


def get_attention(attention: str | AttentionFunction) -> AttentionFunction:
    """The attention called by that name, or the function itself."""
    if not isinstance(attention, str):
        return attention
    if attention not in _BY_NAME:
        raise TPUModelError(
            f"attention '{attention}' is not known; use one of {', '.join(_BY_NAME)}, or pass a "
            f"function.{did_you_mean(attention, _BY_NAME)}"
        )
    return _BY_NAME[attention]

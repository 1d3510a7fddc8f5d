"""Attention of one token over the slots of a cache, and what slots hold after a prompt."""

from collections.abc import Callable
from typing import TypeAlias

import jax
import jax.numpy as jnp

from ..transformer.layer_config import LayerConfig
from ..transformer.mixing import Latents, SharedKeys

# What the channels of queries, keys, values and latents go through where they are kept narrow.
Turn: TypeAlias = Callable[[jax.Array], jax.Array]


def as_it_is(x: jax.Array) -> jax.Array:
    """The array itself: channels that are not turned."""
    return x


def positions_held(positions: jax.Array, slots: int) -> jax.Array:
    """(rows, slots) the position of the token in each slot; negative where there is none yet.

    Args:
        positions: (rows,) of the newest token of each row.
        slots: A token's slot is its position modulo this.
    """
    behind = (positions[:, None] - jnp.arange(slots)) % slots
    return positions[:, None] - behind


def slots_of_prompts(tokens: jax.Array, lengths: jax.Array, *, slots: int) -> jax.Array:
    """(rows, slots, …) what slots hold of arrays (rows, tokens, …) after prompts of `lengths`."""
    held = positions_held(lengths - 1, slots)
    where = jnp.clip(held, 0, tokens.shape[1] - 1)
    shape = (*where.shape, *(1,) * (tokens.ndim - 2))
    return jnp.take_along_axis(tokens, where.reshape(shape), axis=1)


def visible_slots(layer: LayerConfig, positions: jax.Array, slots: int) -> jax.Array:
    """(rows, slots) whether the newest token attends to the token in a slot."""
    held, now = positions_held(positions, slots), positions[:, None]
    seen = held >= 0
    if layer.sliding_window is not None:
        seen &= held > now - layer.sliding_window
    if layer.attention_chunk is not None:
        seen &= held >= now // layer.attention_chunk * layer.attention_chunk
    return seen


def attend_slots(
    layer: LayerConfig,
    q: jax.Array,
    keys: SharedKeys,
    positions: jax.Array,
    *,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Attention of q (rows, 1, H, D) over keys and values (rows, slots, KV, D).

    What is kept in fewer bits is widened first: XLA's products of two formats are far slower.
    """
    keys = SharedKeys(keys.k.astype(q.dtype), keys.v.astype(q.dtype))
    seen = visible_slots(layer, positions, keys.k.shape[1])
    if sinks is None and layer.attention_soft_cap is None:
        return jax.nn.dot_product_attention(
            q, keys.k, keys.v, mask=seen[:, None, None], scale=layer.attention_scale
        )
    rows, _, heads, width = q.shape
    grouped = q.reshape(rows, keys.k.shape[2], -1, width)
    scores = _wide("bkgd,bskd->bkgs", grouped, keys.k)
    weights = _weigh(layer, scores, seen[:, None, None], width, sinks)
    return _wide("bkgs,bskd->bkgd", weights, keys.v).astype(q.dtype).reshape(rows, 1, heads, -1)


def attend_latents(
    layer: LayerConfig,
    q: tuple[jax.Array, jax.Array],
    latents: Latents,
    matrices: tuple[jax.Array, jax.Array],
    positions: jax.Array,
    *,
    turn: Turn = as_it_is,
) -> jax.Array:
    """Latent attention of one token, in the space of latents -> (rows, 1, H, v_dim).

    Each query is multiplied with the matrix that would make keys, and each head's result with the
    one that would make values: a row's slots are read once for all heads.

    Args:
        layer: Whose attention it is.
        q: (rows, 1, H, nope_dim) and (rows, 1, H, rope_dim).
        latents: (rows, slots, kv_rank) and (rows, slots, rope_dim).
        matrices: (kv_rank, H, nope_dim) and (kv_rank, H, v_dim).
        positions: (rows,) of the tokens.
        turn: What the channels of `latents` went through.
    """
    (nope, rope), (to_keys, to_values) = q, matrices
    in_latents = _wide("bhn,rhn->bhr", nope[:, 0], to_keys).astype(nope.dtype)
    latents = Latents(*(one.astype(nope.dtype) for one in latents))
    scores = _wide("bhr,bsr->bhs", turn(in_latents), latents.latent)
    scores += _wide("bhd,bsd->bhs", turn(rope[:, 0]), latents.rope_key)
    seen = visible_slots(layer, positions, latents.latent.shape[1])
    weights = _weigh(layer, scores, seen[:, None], layer.qk_dim, None)
    mixed = turn(_wide("bhs,bsr->bhr", weights.astype(nope.dtype), latents.latent))
    return _wide("bhr,rhv->bhv", mixed.astype(nope.dtype), to_values).astype(nope.dtype)[:, None]


def _weigh(
    layer: LayerConfig, scores: jax.Array, seen: jax.Array, width: int, sinks: jax.Array | None
) -> jax.Array:
    scores = scores * (width**-0.5 if layer.attention_scale is None else layer.attention_scale)
    if layer.attention_soft_cap is not None:
        scores = layer.attention_soft_cap * jnp.tanh(scores / layer.attention_soft_cap)
    scores = jnp.where(seen, scores, -jnp.inf)
    if sinks is None:
        return jax.nn.softmax(scores, axis=-1)
    grouped = sinks.reshape(1, *scores.shape[1:-1], 1).astype(scores.dtype)
    with_sink = jnp.concatenate([scores, jnp.broadcast_to(grouped, (*scores.shape[:-1], 1))], -1)
    return jax.nn.softmax(with_sink, axis=-1)[..., :-1]


def _wide(equation: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """A product whose sums are float32 at least, however narrow its operands are."""
    wide = jnp.promote_types(jnp.promote_types(a.dtype, b.dtype), jnp.float32)
    return jnp.einsum(equation, a, b, preferred_element_type=wide)

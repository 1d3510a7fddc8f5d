"""The gated delta rule in chunks: products of matrices inside a chunk, a scan from one to the next.

Inside a chunk of C tokens let G be the sum of g up to a token. With A[i, j] = beta[i] (k[i] · k[j])
exp(G[i] - G[j]) for j < i, what all tokens write solves a triangular system in one go,

    (I + A) U = beta (V - exp(G) K S),

and with U the results and the next state are products:

    O = exp(G) Q S + (Q Kᵀ ∘ exp(G[i] - G[j])) U,    S' = exp(G[C]) S + (exp(G[C] - G) K)ᵀ U.

Every decay is the exponential of a sum of g over the tokens between, which is at most zero, so none
overflows. A document that starts inside a chunk cuts: pairs of tokens of two documents, and what an
earlier state would give or a later one would take, get the factor zero.

Letters of axes: n chunks, b batch, h heads of keys, r heads of values for each, i and j tokens
of a chunk, d width of keys, e width of values.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ...blocks.tiling import round_up
from .reference import first_state, unit_heads
from .triangular import unit_lower_inverse


class Chunks(NamedTuple):
    """What the scan needs of each chunk: all that does not depend on the state."""

    queries: jax.Array  # (n, b, h, i, d)
    keys: jax.Array  # (n, b, h, i, d)
    written: jax.Array  # (n, b, h, r, i, e): what tokens write to an empty state
    held: jax.Array  # (n, b, h, r, i, d): times the state, what it takes off that
    scores: jax.Array  # (n, b, h, r, i, j)
    fade: jax.Array  # (n, b, h, r, i): of the state until each token
    rest: jax.Array  # (n, b, h, r, i): of each token until the end
    fade_whole: jax.Array  # (n, b, h, r)


def gated_delta(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    initial_state: jax.Array | None = None,
    starts: jax.Array | None = None,
    *,
    chunk: int = 64,
) -> tuple[jax.Array, jax.Array]:
    """See `reference.gated_delta`."""
    batch, tokens, key_heads, _ = k.shape
    group = v.shape[2] // key_heads
    chunks = make_chunks(q, k, v, g, beta, starts, chunk=chunk)
    state = first_state(k, v, initial_state)
    state = state.reshape(batch, key_heads, group, *state.shape[2:])
    state, out = jax.lax.scan(jax.checkpoint(pass_chunk), state, chunks)
    # (n, b, h, r, i, e) -> (b, n i, h r, e)
    out = out.transpose(1, 0, 4, 2, 3, 5).reshape(batch, -1, key_heads * group, v.shape[3])
    return out[:, :tokens].astype(q.dtype), state.reshape(batch, -1, *state.shape[3:])


def make_chunks(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    starts: jax.Array | None,
    *,
    chunk: int,
) -> Chunks:
    """Cut into chunks, padded with tokens that neither fade nor write, and solve all of them."""
    wide = jnp.promote_types(v.dtype, jnp.float32)
    group = v.shape[2] // k.shape[2]
    queries, keys = (_cut(x.astype(q.dtype), chunk) for x in unit_heads(q, k, wide))
    values = _by_group(_cut(v, chunk), group)
    g, beta = (_by_group(_cut(x.astype(wide), chunk), group) for x in (g, beta))
    between, seen = sums_between(g), jnp.tril(jnp.ones((chunk, chunk), bool))
    fade, rest = jnp.exp(jnp.cumsum(g, axis=-1)), jnp.exp(between[..., -1, :])
    if starts is not None:
        # Tokens of one document have seen equally many starts.
        document = jnp.cumsum(_cut(starts.astype(jnp.int32), chunk), axis=-1)[:, :, None, None]
        seen = seen & (document[..., :, None] == document[..., None, :])
        fade = jnp.where(document == 0, fade, 0)
        rest = jnp.where(document == document[..., -1:], rest, 0)
    # Masked before the exponential, not behind it: a gradient of zero times infinity is none.
    decay = jnp.exp(jnp.where(seen, between, -jnp.inf))
    overlaps = _product("nbhid,nbhjd->nbhij", keys, keys)[:, :, :, None]
    inverse = unit_lower_inverse(jnp.tril(beta[..., None] * overlaps * decay, -1))
    inverse = inverse * beta[..., None, :]
    scores = _product("nbhid,nbhjd->nbhij", queries, keys)[:, :, :, None] * decay
    # The scan reads each of these once a chunk: in the dtype of the values they are half as much.
    narrow = v.dtype
    return Chunks(
        queries,
        keys,
        written=_product("nbhrij,nbhrje->nbhrie", inverse.astype(narrow), values),
        held=_product(
            "nbhrij,nbhjd->nbhrid", (inverse * fade[..., None, :]).astype(narrow), keys
        ).astype(narrow),
        scores=scores.astype(narrow),
        fade=fade,
        rest=rest,
        fade_whole=fade[..., -1],
    )


def sums_between(g: jax.Array) -> jax.Array:
    """(…, C) to (…, C, C): for j <= i the sum of g over the tokens behind j until i.

    A difference of two running sums would lose its digits behind a token that forgets all. The
    sums of multiples of 1/256 are exact in float32 up to 65536, and what is left over of each g is
    so small that the sums of that are near enough.
    """
    bounded = jnp.maximum(g, -65536 / g.shape[-1])  # of less than that nothing is left either
    coarse = jax.lax.stop_gradient(jnp.round(bounded * 256) / 256)
    steps, rest = (jnp.cumsum(x, axis=-1) for x in (coarse, bounded - coarse))
    return (steps[..., :, None] - steps[..., None, :]) + (rest[..., :, None] - rest[..., None, :])


def pass_chunk(state: jax.Array, chunk: Chunks) -> tuple[jax.Array, jax.Array]:
    """The state behind a chunk, from that before it (b, h, r, d, e), and the chunk's results."""
    narrow = chunk.held.dtype
    before = state.astype(narrow)
    written = chunk.written - _product("bhrid,bhrde->bhrie", chunk.held, before)
    out = chunk.fade[..., None] * _product("bhid,bhrde->bhrie", chunk.queries, before)
    out = out + _product("bhrij,bhrje->bhrie", chunk.scores, written.astype(narrow))
    lasting = (chunk.rest[..., None] * written).astype(narrow)
    state = chunk.fade_whole[..., None, None] * state
    state = state + _product("bhid,bhrie->bhrde", chunk.keys, lasting)
    return state, out.astype(narrow)


def _product(axes: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """A product with a sum in float32 or wider; float32 itself is not rounded."""
    return jnp.einsum(
        axes,
        a,
        b,
        precision=jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.promote_types(a.dtype, jnp.float32),
    )


def _cut(x: jax.Array, chunk: int) -> jax.Array:
    """(b, s, …) as (n, b, …, i) or, of heads with a width, (n, b, h, i, d); zeros behind."""
    padding = round_up(x.shape[1], chunk) - x.shape[1]
    x = jnp.pad(x, [(0, 0), (0, padding), *[(0, 0)] * (x.ndim - 2)])
    x = jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)
    return jnp.moveaxis(x, 2, min(3, x.ndim - 1))


def _by_group(x: jax.Array, group: int) -> jax.Array:
    """(n, b, heads of values, …) with those heads as (heads of keys, group)."""
    return x.reshape(*x.shape[:2], -1, group, *x.shape[3:])

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

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...blocks.tiling import round_up
from .reference import first_state, unit_heads
from .triangular import unit_lower_inverse


class DeltaResiduals(NamedTuple):
    """The arguments, which are all that the gradients need."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    g: jax.Array
    beta: jax.Array
    initial_state: jax.Array | None = None
    starts: jax.Array | None = None


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


def forward(*arrays: Any, chunk: int = 64) -> tuple[tuple[jax.Array, jax.Array], DeltaResiduals]:
    """The result and the last state, and the arguments as residuals."""
    residuals = DeltaResiduals(*arrays)
    return gated_delta(*residuals, chunk=chunk), residuals


def backward(
    residuals: DeltaResiduals, cotangent: tuple[jax.Array, jax.Array], *, chunk: int = 64
) -> tuple[jax.Array | None, ...]:
    """Gradients of all arguments but the starts, from chunks that are computed again."""
    *arrays, starts = residuals

    def rule(*arrays: Any) -> tuple[jax.Array, jax.Array]:
        return gated_delta(*arrays, starts=starts, chunk=chunk)

    _, pull = jax.vjp(rule, *arrays)
    return *pull(cotangent), None


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
    rates = chunk_rates(g.astype(wide), beta.astype(wide), starts, chunk)
    steps, rest_of_steps, beta, fade, rest = (_by_group(x, group) for x in rates[:5])
    seen = jnp.tril(jnp.ones((chunk, chunk), bool))
    if starts is not None:
        seen = seen & (_differences(rates.document) == 0)[:, :, :, None]
    between = _differences(steps) + _differences(rest_of_steps)
    # Masked before the exponential, not behind it: a gradient of zero times infinity is none.
    decay = jnp.exp(jnp.where(seen, between, -jnp.inf))
    overlaps = _product("nbhid,nbhjd->nbhij", keys, keys)[:, :, :, None]
    inverse = unit_lower_inverse(jnp.tril(beta[..., None] * overlaps * decay, -1), v.dtype)
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


class ChunkRates(NamedTuple):
    """What the tokens of each chunk do to the state and to each other: (n, b, heads, i)."""

    steps: jax.Array  # running sums of g, exact
    rest_of_steps: jax.Array  # and of what those leave over
    beta: jax.Array
    fade: jax.Array  # of the state before the chunk, until each token
    rest: jax.Array  # of what each token writes, until the end of the chunk
    document: jax.Array  # starts that a token has seen; one head for all


def chunk_rates(g: jax.Array, beta: jax.Array, starts: jax.Array | None, chunk: int) -> ChunkRates:
    """Cut rates (b, s, heads) into chunks and add up g.

    A difference of two running sums would lose its digits behind a token that forgets all. Sums of
    multiples of 1/256 are exact in float32 up to 65536, and what is left over of each g is so small
    that sums of that are near enough.
    """
    wide = jnp.promote_types(g.dtype, jnp.float32)
    g, beta = (_cut(x.astype(wide), chunk) for x in (g, beta))
    bounded = jnp.maximum(g, -65536 / chunk)  # of less than that nothing is left either
    coarse = jax.lax.stop_gradient(jnp.round(bounded * 256) / 256)
    steps, rest_of_steps = (jnp.cumsum(x, axis=-1) for x in (coarse, bounded - coarse))
    fade = jnp.exp(steps + rest_of_steps)
    rest = jnp.exp((steps[..., -1:] - steps) + (rest_of_steps[..., -1:] - rest_of_steps))
    document = jnp.zeros((*g.shape[:2], 1, chunk), wide)
    if starts is not None:
        # Tokens of one document have seen equally many starts.
        document = jnp.cumsum(_cut(starts.astype(wide), chunk), axis=-1)[:, :, None]
        fade = jnp.where(document == 0, fade, 0)
        rest = jnp.where(document == document[..., -1:], rest, 0)
    return ChunkRates(steps, rest_of_steps, beta, fade, rest, document)


def _differences(x: jax.Array) -> jax.Array:
    return x[..., :, None] - x[..., None, :]


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

"""The gated delta rule in chunks: matmuls inside a chunk, a scan from one to the next.

Inside a chunk of C tokens let G be the sum of g up to a token. With A[i, j] = beta[i] (k[i] · k[j])
exp(G[i] - G[j]) for j < i, what all tokens write solves one triangular system,

    (I + A) U = beta (V - exp(G) K S),

and with U the results and the next state are matmuls:

    O = exp(G) Q S + (Q Kᵀ ∘ exp(G[i] - G[j])) U,    S' = exp(G[C]) S + (exp(G[C] - G) K)ᵀ U.

Every decay is the exponential of a sum of g over the tokens between, which is at most zero, so none
overflows. A document that starts inside a chunk separates tokens: pairs of tokens of two documents,
and contributions of an earlier state or to a later one, get the factor zero.

Letters of axes: n chunks, b batch, h heads of keys, r heads of values per head of keys, i and j
tokens of a chunk, d width of keys, e width of values.
"""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from ....annotations import PyTree
from ...blocks.tiling import round_up
from ...registry.dispatch import with_backward
from .reference import first_state, unit_heads

Product = Callable[[jax.Array, jax.Array], jax.Array]


def unit_lower_inverse(a: jax.Array, operands: DTypeLike | None = None) -> jax.Array:
    """Return (I + A)⁻¹ of the strictly lower part A of each (…, C, C), C a power of two.

    Matmuls take `operands` (by default the dtype of A) and sum in the dtype of A. In bfloat16 they
    add 0.2 to 8 % to the error of bfloat16 values, keys and states.

    Inverses of the diagonal blocks of size b give those of size 2b: with L the blocks left of the
    diagonal inside 2b, T becomes T - T L T. That is substitution by blocks. The product of powers
    (I - A)(I + A²)(I + A⁴)… takes as many matmuls, but repeated keys make its powers grow as
    binomial coefficients, up to 10¹⁸ for 64 of them, which exceeds the precision of float32.
    """
    product = partial(_matmul, operands=operands or a.dtype)
    return with_backward(partial(_invert, product), partial(_invert_backward, product), a)


def merging_mask(size: int, block: int) -> np.ndarray:
    """Return True in the lower left quarter of each diagonal block of twice `block`."""
    row, column = np.arange(size)[:, None], np.arange(size)[None, :]
    is_left = (row // block) % 2 == 1
    return is_left & (column // block == row // block - 1)


def _invert(product: Product, a: jax.Array) -> tuple[jax.Array, jax.Array]:
    size = a.shape[-1]
    # Blocks of size one are their own inverses, so that the first merge needs no matmul.
    inverse = jnp.eye(size, dtype=a.dtype) - jnp.where(merging_mask(size, 1), a, 0)
    block = 2
    while block < size:
        left = jnp.where(merging_mask(size, block), a, 0)
        inverse = inverse - product(product(inverse, left), inverse)
        block *= 2
    return inverse, inverse


def _invert_backward(
    product: Product, inverse: jax.Array, cotangent: jax.Array
) -> tuple[jax.Array]:
    """Return d(T) = -T dA T, of which only the strictly lower part is an argument."""
    transposed = jnp.swapaxes(inverse, -1, -2)
    gradient = -product(product(transposed, cotangent), transposed)
    return (jnp.tril(gradient, -1),)


def _matmul(a: jax.Array, b: jax.Array, *, operands: DTypeLike) -> jax.Array:
    return jnp.matmul(
        a.astype(operands),
        b.astype(operands),
        precision=None if operands == jnp.bfloat16 else jax.lax.Precision.HIGHEST,
        preferred_element_type=a.dtype,
    )


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
    """What the scan needs of each chunk and does not depend on the state."""

    queries: jax.Array  # (n, b, h, i, d)
    keys: jax.Array  # (n, b, h, i, d)
    written: jax.Array  # (n, b, h, r, i, e): what tokens write to a state of zeros
    held: jax.Array  # (n, b, h, r, i, d): times the state, what is subtracted from that
    scores: jax.Array  # (n, b, h, r, i, j)
    fade: jax.Array  # (n, b, h, r, i): decay of the state until each token
    rest: jax.Array  # (n, b, h, r, i): decay of each token until the end
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
    """Compute `reference.gated_delta` in chunks."""
    batch, tokens, key_heads, _ = k.shape
    group = v.shape[2] // key_heads
    chunks = make_chunks(q, k, v, g, beta, starts, chunk=chunk)
    state = first_state(k, v, initial_state)
    state = state.reshape(batch, key_heads, group, *state.shape[2:])
    state, out = jax.lax.scan(jax.checkpoint(pass_chunk), state, chunks)
    # (n, b, h, r, i, e) -> (b, n i, h r, e)
    out = out.transpose(1, 0, 4, 2, 3, 5).reshape(batch, -1, key_heads * group, v.shape[3])
    return out[:, :tokens].astype(q.dtype), state.reshape(batch, -1, *state.shape[3:])


def forward(*arrays: PyTree, chunk: int = 64) -> tuple[tuple[jax.Array, jax.Array], DeltaResiduals]:
    """Return the result and the last state, and the arguments as residuals."""
    residuals = DeltaResiduals(*arrays)
    return gated_delta(*residuals, chunk=chunk), residuals


def backward(
    residuals: DeltaResiduals, cotangent: tuple[jax.Array, jax.Array], *, chunk: int = 64
) -> tuple[jax.Array | None, ...]:
    """Return the gradients of all arguments but the starts, from recomputed chunks."""
    *arrays, starts = residuals

    def rule(*arrays: PyTree) -> tuple[jax.Array, jax.Array]:
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
    """Split into chunks, padded with tokens that neither decay nor write, and solve them."""
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
    # Masked before the exponential, because a gradient of zero times infinity is NaN after it.
    decay = jnp.exp(jnp.where(seen, between, -jnp.inf))
    overlaps = _einsum("nbhid,nbhjd->nbhij", keys, keys)[:, :, :, None]
    inverse = unit_lower_inverse(jnp.tril(beta[..., None] * overlaps * decay, -1), v.dtype)
    inverse = inverse * beta[..., None, :]
    scores = _einsum("nbhid,nbhjd->nbhij", queries, keys)[:, :, :, None] * decay
    # The scan reads each of these once per chunk, at half the bytes in the dtype of the values.
    narrow = v.dtype
    return Chunks(
        queries,
        keys,
        written=_einsum("nbhrij,nbhrje->nbhrie", inverse.astype(narrow), values),
        held=_einsum(
            "nbhrij,nbhjd->nbhrid", (inverse * fade[..., None, :]).astype(narrow), keys
        ).astype(narrow),
        scores=scores.astype(narrow),
        fade=fade,
        rest=rest,
        fade_whole=fade[..., -1],
    )


class ChunkRates(NamedTuple):
    """The effect of each chunk's tokens on the state and on each other: (n, b, heads, i)."""

    steps: jax.Array  # running sums of g, exact
    rest_of_steps: jax.Array  # and of their remainders
    beta: jax.Array
    fade: jax.Array  # decay of the state before the chunk, until each token
    rest: jax.Array  # decay of what each token writes, until the end of the chunk
    document: jax.Array  # starts up to a token; one head for all


def chunk_rates(g: jax.Array, beta: jax.Array, starts: jax.Array | None, chunk: int) -> ChunkRates:
    """Split rates (b, s, heads) into chunks and add up g.

    A difference of two running sums would lose precision after a token that forgets everything.
    Sums of multiples of 1/256 are exact in float32 up to 65536, and the remainder of each g is so
    small that its sums are precise enough.
    """
    wide = jnp.promote_types(g.dtype, jnp.float32)
    g, beta = (_cut(x.astype(wide), chunk) for x in (g, beta))
    bounded = jnp.maximum(g, -65536 / chunk)  # smaller decays are zero as well
    coarse = jax.lax.stop_gradient(jnp.round(bounded * 256) / 256)
    steps, rest_of_steps = (jnp.cumsum(x, axis=-1) for x in (coarse, bounded - coarse))
    fade = jnp.exp(steps + rest_of_steps)
    rest = jnp.exp((steps[..., -1:] - steps) + (rest_of_steps[..., -1:] - rest_of_steps))
    document = jnp.zeros((*g.shape[:2], 1, chunk), wide)
    if starts is not None:
        # Tokens of one document have the same count of starts before them.
        document = jnp.cumsum(_cut(starts.astype(wide), chunk), axis=-1)[:, :, None]
        fade = jnp.where(document == 0, fade, 0)
        rest = jnp.where(document == document[..., -1:], rest, 0)
    return ChunkRates(steps, rest_of_steps, beta, fade, rest, document)


def _differences(x: jax.Array) -> jax.Array:
    return x[..., :, None] - x[..., None, :]


def pass_chunk(state: jax.Array, chunk: Chunks) -> tuple[jax.Array, jax.Array]:
    """Return the state after a chunk, from that before it (b, h, r, d, e), and the results."""
    narrow = chunk.held.dtype
    before = state.astype(narrow)
    written = chunk.written - _einsum("bhrid,bhrde->bhrie", chunk.held, before)
    out = chunk.fade[..., None] * _einsum("bhid,bhrde->bhrie", chunk.queries, before)
    out = out + _einsum("bhrij,bhrje->bhrie", chunk.scores, written.astype(narrow))
    lasting = (chunk.rest[..., None] * written).astype(narrow)
    state = chunk.fade_whole[..., None, None] * state
    state = state + _einsum("bhid,bhrie->bhrde", chunk.keys, lasting)
    return state, out.astype(narrow)


def _einsum(axes: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Multiply, summing in float32 or wider; float32 itself is not rounded."""
    return jnp.einsum(
        axes,
        a,
        b,
        precision=jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None,
        preferred_element_type=jnp.promote_types(a.dtype, jnp.float32),
    )


def _cut(x: jax.Array, chunk: int) -> jax.Array:
    """Reshape (b, s, …) to (n, b, …, i) or, with a width, (n, b, h, i, d), zero-padded."""
    padding = round_up(x.shape[1], chunk) - x.shape[1]
    x = jnp.pad(x, [(0, 0), (0, padding), *[(0, 0)] * (x.ndim - 2)])
    x = jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)
    return jnp.moveaxis(x, 2, min(3, x.ndim - 1))


def _by_group(x: jax.Array, group: int) -> jax.Array:
    """Reshape (n, b, heads of values, …), with those heads as (heads of keys, group)."""
    return x.reshape(*x.shape[:2], -1, group, *x.shape[3:])

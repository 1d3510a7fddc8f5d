"""Cross-entropy on one GPU where tokens are few: the logits' gradient is kept, never the logits.

Chunks that add to the head's gradient hold it in float32 and pass over it once each. With fewer
tokens than the head is wide or so, the gradient of all logits in the type of x is the smaller
array: chunks only fill it in, and two products after them are all that is left to do.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from ...registry.gradient import with_backward
from . import triton_gpu
from .terms import LossTerms, scaled

Figures = tuple[jax.Array, jax.Array]  # a loss and a log-normaliser for each token
Pulled = tuple[jax.Array, jax.Array, jax.Array]

# Chunks of fewer tokens give away more time than they save memory: each passes over the head's
# gradient in float32 (H200, 2048 tokens 4096 wide: 1 of 10 ms) ...
FEWEST_ADDED = 4096
# ... or, where it only fills in, makes products that no longer fill the chip.
FEWEST_FILLED = 2048


class Cut(NamedTuple):
    """How tokens are cut on one GPU."""

    chunks: int
    is_filled: bool  # whether chunks fill in the gradient of all logits


def leanest_cut(tokens: int, width: int, vocab: int, *, logit_bytes: int, slope_bytes: int) -> Cut:
    """The cut that holds least; all that is counted grows with the vocabulary alike."""
    most = max(1, tokens // FEWEST_ADDED)
    cuts = [Cut(count, is_filled=False) for count in range(1, most + 1)]
    if triton_gpu.is_wide(vocab):
        counts = range(2, tokens // FEWEST_FILLED + 1)
        cuts += [Cut(count, is_filled=True) for count in counts if tokens % count == 0]

    def held(cut: Cut) -> float:
        logits = tokens / cut.chunks * logit_bytes
        if cut.is_filled:
            return logits + tokens * slope_bytes
        head = 4 * width if cut.chunks > 1 else 0
        return logits + tokens / cut.chunks * slope_bytes + head

    return min(cuts, key=held)


def filled_total(
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    terms: LossTerms,
    count: int,
) -> tuple[jax.Array, jax.Array]:
    """The weighted sum of losses, and log-normalisers (T,), which pass no gradient.

    Args:
        x: (T, d) activations.
        w: (d, V) the output matrix.
        labels: (T,).
        weights: (T,) of the tokens, in float32.
        terms: What a loss is.
        count: Chunks, a divisor of T.
    """
    static = {"terms": terms, "count": count}
    return with_backward(
        partial(_forward, **static),
        _backward,
        *(x, w, labels, weights),
        result=partial(_without_gradient, **static),
    )


def _without_gradient(
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    *,
    terms: LossTerms,
    count: int,
) -> Figures:
    def one_chunk(piece: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, labels = piece
        return terms.of_logits(_logits(x, w), labels)

    pieces = (x.reshape(count, -1, x.shape[-1]), labels.reshape(count, -1))
    losses, log_normaliser = jax.lax.map(one_chunk, pieces)
    return (losses.reshape(-1) * weights).sum(), log_normaliser.reshape(-1)


def _forward(
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    *,
    terms: LossTerms,
    count: int,
) -> tuple[Figures, Pulled]:
    tokens = x.shape[0]
    size = tokens // count

    def fill(slopes: jax.Array | None, number: jax.typing.ArrayLike) -> tuple[jax.Array, Figures]:
        first = number * size

        def chunk(array: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(array, first, size)

        losses, log_normaliser, filled = triton_gpu.losses_and_slopes(
            *(_logits(chunk(x), w), chunk(labels), chunk(weights), terms),
            dtype=x.dtype,
            place=triton_gpu.Place(tokens, first, slopes),
        )
        return filled, (losses, log_normaliser)

    slopes, one = fill(None, 0)
    slopes, others = jax.lax.scan(fill, slopes, jnp.arange(1, count))
    losses, log_normaliser = (
        jnp.concatenate([first, rest.reshape(-1)]) for first, rest in zip(one, others, strict=True)
    )
    d_x = jnp.einsum("tv,dv->td", slopes, w)
    d_w = jnp.einsum("td,tv->dv", x, slopes)
    return ((losses * weights).sum(), log_normaliser), (d_x, d_w, losses)


def _backward(
    pulled: Pulled, factors: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, None, jax.Array]:
    d_x, d_w, losses = scaled(pulled, factors[0])
    return d_x, d_w, None, losses


def _logits(x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.dot(x, w, preferred_element_type=jnp.float32)

"""From a chunk's logits to losses and gradients on an NVIDIA GPU: two looks at each row.

XLA reads logits three times, for their largest, their sum and their gradient, and writes the
gradient beside them. Here a row is a program: the first look finds the normaliser, and the second
finds the row still in the cache and writes the gradient, over the logits where they have its type.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from ..tiling import round_up
from .terms import LossTerms

LANES = 2048  # columns that are read at once
READS = 4  # of so many columns in a step: their sums are rescaled once
_WARPS = 8
_LOWEST = -1e30  # below any logit, and its difference to itself is a number


def fits(logits: jax.Array) -> bool:
    """Whether the kernel takes these logits: narrow rows leave most of a program idle."""
    return logits.dtype in (jnp.float32, jnp.bfloat16) and logits.shape[-1] >= LANES * READS


def losses_and_slopes(
    logits: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    terms: LossTerms,
    *,
    dtype: jax.typing.DTypeLike,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What `LossTerms.of_logits` and `LossTerms.gradient` say, in one kernel.

    Args:
        logits: (..., V), uncapped.
        labels: (...), the right column; with a negative one the chosen logit counts as zero.
        weights: (...), the factor of each token's gradient, in float32.
        terms: What a loss is.
        dtype: Of the gradient.
        interpret: Run in plain jax.

    Returns:
        Losses and log-normalisers (...) in float32, and the gradient (..., V).
    """
    vocab = logits.shape[-1]
    rows = logits.size // vocab
    row = pl.BlockSpec((1, round_up(vocab, LANES)), lambda i: (i, 0))
    one = pl.BlockSpec((1,), lambda i: (i,))
    figure = jax.ShapeDtypeStruct((rows,), jnp.float32)
    call: Any = pl.pallas_call(
        partial(_row, vocab=vocab, terms=terms),
        grid=(rows,),
        in_specs=[row, one, one],
        out_specs=[one, one, row],
        out_shape=[figure, figure, jax.ShapeDtypeStruct((rows, vocab), dtype)],
        input_output_aliases={0: 2} if logits.dtype == dtype else {},
        compiler_params=triton.CompilerParams(num_warps=_WARPS),
        interpret=interpret,
        name="cross_entropy_losses_and_slopes",
    )
    losses, log_normaliser, slopes = call(
        logits.reshape(rows, vocab),
        labels.reshape(rows).astype(jnp.int32),
        weights.reshape(rows).astype(jnp.float32),
    )
    shape = labels.shape
    return losses.reshape(shape), log_normaliser.reshape(shape), slopes.reshape(logits.shape)


def _row(
    logits_ref: Any,
    label_ref: Any,
    weight_ref: Any,
    loss_ref: Any,
    normaliser_ref: Any,
    slopes_ref: Any,
    *,
    vocab: int,
    terms: LossTerms,
) -> None:
    label, weight = label_ref[0], weight_ref[0]

    def at(ref: Any, place: Any) -> Any:
        return ref.at[pl.ds(0, 1), pl.ds(place * LANES, LANES)]

    def columns(place: Any) -> jax.Array:
        return place * LANES + jnp.arange(LANES)[None]

    def read(place: Any) -> jax.Array:
        inside = None if vocab % LANES == 0 else columns(place) < vocab
        other = None if inside is None else _LOWEST
        return triton.load(at(logits_ref, place), mask=inside, other=other).astype(jnp.float32)

    def add_reads(first: Any, carry: Any, count: int) -> Any:
        largest, total = carry
        seen = [terms.capped(read(first + n)) for n in range(count)]
        if terms.soft_cap is not None and vocab % LANES:
            # A cap would lift what stands in for columns that are not there.
            seen = [jnp.where(columns(first + n) < vocab, x, _LOWEST) for n, x in enumerate(seen)]
        higher = largest
        for x in seen:
            higher = jnp.maximum(higher, x)
        total = total * jnp.exp(largest - higher)
        for x in seen:
            total = total + jnp.exp(x - higher)
        return higher, total

    places = -(-vocab // LANES)
    whole = places // READS
    carry = (jnp.full((1, LANES), _LOWEST, jnp.float32), jnp.zeros((1, LANES), jnp.float32))
    carry = jax.lax.fori_loop(0, whole, lambda i, c: add_reads(i * READS, c, READS), carry)
    if places % READS:
        carry = add_reads(whole * READS, carry, places % READS)
    largest, total = carry
    top = jnp.max(largest)
    log_normaliser = top + jnp.log(jnp.sum(total * jnp.exp(largest - top)))
    logit = logits_ref[0, jnp.maximum(label, 0)].astype(jnp.float32)
    chosen = jnp.where(label >= 0, terms.capped(logit), 0.0)
    loss_ref[0] = terms.from_normaliser(log_normaliser, chosen)
    normaliser_ref[0] = log_normaliser

    def write(place: Any, _: None) -> None:
        inside = None if vocab % LANES == 0 else columns(place) < vocab
        slopes = terms.gradient(read(place), columns(place) == label, log_normaliser, weight)
        triton.store(at(slopes_ref, place), slopes.astype(slopes_ref.dtype), mask=inside)

    jax.lax.fori_loop(0, places, write, None)

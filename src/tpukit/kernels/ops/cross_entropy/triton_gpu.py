"""From a chunk's logits to losses and gradients on an NVIDIA GPU: two looks at each row.

XLA reads logits three times, for their largest, their sum and their gradient, and writes the
gradient beside them. Here a row is a program: the first look finds the normaliser, and the second
finds the row still in the cache and writes the gradient, over the logits where they have its type.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from ...blocks.tiling import round_up
from .terms import LossTerms

LANES = 2048  # columns that are read at once
READS = 4  # of so many columns in a step: their sums are rescaled once
_WARPS = 8
_LOWEST = -1e30  # below any logit, and its difference to itself is a number


def fits(logits: jax.Array) -> bool:
    """Whether the kernel takes these logits."""
    return logits.dtype in (jnp.float32, jnp.bfloat16) and is_wide(logits.shape[-1])


def is_wide(vocab: int) -> bool:
    """Whether rows are worth the kernel: narrow ones leave most of a program idle."""
    return vocab >= LANES * READS


def losses_and_slopes(
    logits: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    terms: LossTerms,
    *,
    dtype: jax.typing.DTypeLike,
    place: "Place | None" = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What `LossTerms.of_logits` and `LossTerms.gradient` say, in one kernel.

    Args:
        logits: (..., V), uncapped.
        labels: (...), the right column; with a negative one the chosen logit counts as zero.
        weights: (...), the factor of each token's gradient, in float32.
        terms: What a loss is.
        dtype: Of the gradient.
        place: Where the gradient is written; None is an array of its own.
        interpret: Run in plain jax.

    Returns:
        Losses and log-normalisers (...) in float32, and the gradient (..., V), or the array that
        it was written into.
    """
    vocab = logits.shape[-1]
    rows = logits.size // vocab
    row = pl.BlockSpec((1, round_up(vocab, LANES)), lambda i: (i, 0))
    one = pl.BlockSpec((1,), lambda i: (i,))
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    figure = jax.ShapeDtypeStruct((rows,), jnp.float32)
    place = place or Place(rows, 0)
    aliases = {0: 2} if logits.dtype == dtype and place.rows == rows else {}
    aliases |= {} if place.array is None else {4: 2}
    call: Any = pl.pallas_call(
        partial(_row, vocab=vocab, terms=terms),
        grid=(rows,),
        in_specs=[row, one, one, anywhere, *([] if place.array is None else [anywhere])],
        out_specs=[one, one, anywhere],
        out_shape=[figure, figure, jax.ShapeDtypeStruct((place.rows, vocab), dtype)],
        input_output_aliases=aliases,
        compiler_params=triton.CompilerParams(num_warps=_WARPS),
        interpret=interpret,
        name="cross_entropy_losses_and_slopes",
    )
    losses, log_normaliser, slopes = call(
        logits.reshape(rows, vocab),
        labels.reshape(rows).astype(jnp.int32),
        weights.reshape(rows).astype(jnp.float32),
        jnp.full((1,), place.first_row, jnp.int32),
        *([] if place.array is None else [place.array]),
    )
    slopes = slopes.reshape(logits.shape) if place.rows == rows else slopes
    return losses.reshape(labels.shape), log_normaliser.reshape(labels.shape), slopes


class Place(NamedTuple):
    """Rows of a larger array that a chunk's gradient is written into.

    Attributes:
        rows: Of the larger array.
        first_row: Where the chunk begins in it.
        array: The array, with other chunks in it; None makes one whose other rows are anything.
    """

    rows: int
    first_row: jax.typing.ArrayLike
    array: jax.Array | None = None


def _row(
    logits_ref: Any,
    label_ref: Any,
    weight_ref: Any,
    first_row_ref: Any,
    *rest: Any,
    vocab: int,
    terms: LossTerms,
) -> None:
    loss_ref, normaliser_ref, slopes_ref = rest[-3:]  # before them, what slopes are written into
    label, weight = label_ref[0], weight_ref[0]
    row_of_slopes = first_row_ref[0] + pl.program_id(0)

    def at(ref: Any, row: Any, place: Any) -> Any:
        return ref.at[pl.ds(row, 1), pl.ds(place * LANES, LANES)]

    def columns(place: Any) -> jax.Array:
        return place * LANES + jnp.arange(LANES)[None]

    def read(place: Any) -> jax.Array:
        inside = None if vocab % LANES == 0 else columns(place) < vocab
        other = None if inside is None else _LOWEST
        return triton.load(at(logits_ref, 0, place), mask=inside, other=other).astype(jnp.float32)

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
        where = at(slopes_ref, row_of_slopes, place)
        triton.store(where, slopes.astype(slopes_ref.dtype), mask=inside)

    jax.lax.fori_loop(0, places, write, None)

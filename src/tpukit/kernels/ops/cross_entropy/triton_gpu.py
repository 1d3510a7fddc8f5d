"""Losses and gradients from a chunk's logits on an NVIDIA GPU, with two reads of each row.

XLA reads logits three times, for their maximum, their sum and their gradient, and writes the
gradient to another array. Here one program handles one row: the first read finds the normaliser.
The second read hits the cache and writes the gradient, over the logits where the dtypes are equal.

With few tokens the gradient of all logits, in the dtype of x, is smaller than the float32 gradient
of the head that chunks would add to. Then chunks only fill in the gradient of the logits, and two
matmuls follow.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from ....annotations import PyTree
from ...blocks.tiling import Ref, round_up
from ...registry.dispatch import with_backward
from .terms import LossTerms, scaled

LANES = 2048  # columns per read
READS = 4  # reads per step, whose sums are rescaled once
_WARPS = 8
_LOWEST = -1e30  # below any logit; its difference to itself is not NaN


def fits(logits: jax.Array) -> bool:
    """Whether the kernel supports these logits."""
    return logits.dtype in (jnp.float32, jnp.bfloat16) and is_wide(logits.shape[-1])


def is_wide(vocab: int) -> bool:
    """Whether rows are wide enough for the kernel; narrow ones leave most of a program idle."""
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
    """Compute `LossTerms.of_logits` and `LossTerms.gradient` in one kernel.

    Args:
        logits: (..., V), uncapped.
        labels: (...), the correct column; for a negative label the chosen logit counts as zero.
        weights: (...), the factor of each token's gradient, in float32.
        terms: The terms of the loss.
        dtype: Dtype of the gradient.
        place: Where the gradient is written; None writes a new array.
        interpret: Run in plain jax.

    Returns:
        Losses and log-normalisers (...) in float32, and the gradient (..., V), or the array that
        it was written into.
    """
    vocab = logits.shape[-1]
    rows = logits.size // vocab
    row = pl.BlockSpec((1, round_up(vocab, LANES)), lambda i: (i, 0))
    per_row = pl.BlockSpec((1,), lambda i: (i,))
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    figure = jax.ShapeDtypeStruct((rows,), jnp.float32)
    place = place or Place(rows, 0)
    aliases = {0: 2} if logits.dtype == dtype and place.rows == rows else {}
    aliases |= {} if place.array is None else {4: 2}
    call: Any = pl.pallas_call(
        partial(_row, vocab=vocab, terms=terms),
        grid=(rows,),
        in_specs=[row, per_row, per_row, anywhere, *([] if place.array is None else [anywhere])],
        out_specs=[per_row, per_row, anywhere],
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
        rows: Rows of the larger array.
        first_row: Where the chunk begins in it.
        array: The array, with other chunks in it; None makes one whose other rows are undefined.
    """

    rows: int
    first_row: jax.typing.ArrayLike
    array: jax.Array | None = None


def _row(
    logits_ref: Ref,
    label_ref: Ref,
    weight_ref: Ref,
    first_row_ref: Ref,
    *rest: Any,
    vocab: int,
    terms: LossTerms,
) -> None:
    loss_ref, normaliser_ref, slopes_ref = rest[
        -3:
    ]  # before them, the array that gradients are written into
    label, weight = label_ref[0], weight_ref[0]
    row_of_slopes = first_row_ref[0] + pl.program_id(0)

    def at(ref: Ref, row: Any, place: Any) -> Any:
        return ref.at[pl.ds(row, 1), pl.ds(place * LANES, LANES)]

    def columns(place: Any) -> jax.Array:
        return place * LANES + jnp.arange(LANES)[None]

    def read(place: Any) -> jax.Array:
        inside = None if vocab % LANES == 0 else columns(place) < vocab
        other = None if inside is None else _LOWEST
        return triton.load(at(logits_ref, 0, place), mask=inside, other=other).astype(jnp.float32)

    def add_reads(first: Any, carry: PyTree, count: int) -> Any:
        largest, total = carry
        seen = [terms.capped(read(first + n)) for n in range(count)]
        if terms.soft_cap is not None and vocab % LANES:
            # The cap would raise the values that stand in for missing columns.
            seen = [jnp.where(columns(first + n) < vocab, x, _LOWEST) for n, x in enumerate(seen)]
        higher = largest
        for x in seen:
            higher = jnp.maximum(higher, x)
        total = total * jnp.exp(largest - higher)
        for x in seen:
            total = total + jnp.exp(x - higher)
        return higher, total

    places = -(-vocab // LANES)
    full_steps = places // READS
    carry = (jnp.full((1, LANES), _LOWEST, jnp.float32), jnp.zeros((1, LANES), jnp.float32))
    carry = jax.lax.fori_loop(0, full_steps, lambda i, c: add_reads(i * READS, c, READS), carry)
    if places % READS:
        carry = add_reads(full_steps * READS, carry, places % READS)
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


Figures = tuple[jax.Array, jax.Array]  # a loss and a log-normaliser per token
Pulled = tuple[jax.Array, jax.Array, jax.Array]

# Chunks of fewer tokens cost more time than they save memory: each passes over the head's gradient
# in float32 (H200, 2048 tokens 4096 wide: 1 of 10 ms) ...
FEWEST_ADDED = 4096
# ... or, where it only fills in, has matmuls that no longer fill the chip.
FEWEST_FILLED = 2048


class Cut(NamedTuple):
    """How tokens are chunked on one GPU."""

    chunks: int
    is_filled: bool  # whether chunks fill in the gradient of all logits


def leanest_cut(tokens: int, width: int, vocab: int, *, logit_bytes: int, slope_bytes: int) -> Cut:
    """Return the chunking with the least memory; all of it grows with the vocabulary alike."""
    most = max(1, tokens // FEWEST_ADDED)
    cuts = [Cut(count, is_filled=False) for count in range(1, most + 1)]
    if is_wide(vocab):
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
    """Return the weighted sum of losses, and log-normalisers (T,), which have no gradient.

    Args:
        x: (T, d) activations.
        w: (d, V) the output matrix.
        labels: (T,).
        weights: (T,) of the tokens, in float32.
        terms: The terms of the loss.
        count: Number of chunks, a divisor of T.
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
    def chunk_losses(piece: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        x, labels = piece
        return terms.of_logits(_logits(x, w), labels)

    pieces = (x.reshape(count, -1, x.shape[-1]), labels.reshape(count, -1))
    losses, log_normaliser = jax.lax.map(chunk_losses, pieces)
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

        losses, log_normaliser, filled = losses_and_slopes(
            *(_logits(chunk(x), w), chunk(labels), chunk(weights), terms),
            dtype=x.dtype,
            place=Place(tokens, first, slopes),
        )
        return filled, (losses, log_normaliser)

    slopes, figures = fill(None, 0)
    slopes, others = jax.lax.scan(fill, slopes, jnp.arange(1, count))
    losses, log_normaliser = (
        jnp.concatenate([first, rest.reshape(-1)])
        for first, rest in zip(figures, others, strict=True)
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

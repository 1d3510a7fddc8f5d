"""Cross-entropy chunk by chunk in plain XLA: only one chunk's logits are in memory.

A sum of losses is linear in its tokens, so a chunk's gradients are known as soon as its logits are.
They are computed with the loss, which leaves the backward pass only a factor to apply: the same
matmuls as for all logits at once. Losses of single tokens have no such factor, so their backward
pass recomputes the logits of each chunk.

Shapes: n chunks, g groups (devices that shard the tokens; 1 without a mesh), c tokens, width d,
vocabulary v.
"""

import math
from functools import partial
from typing import Protocol

import jax
import jax.numpy as jnp

from ....hardware.target import on_one_gpu
from ...registry.dispatch import with_backward
from . import triton_gpu
from .terms import CrossEntropy, LossTerms, Reduction, scaled, weights_of_mean
from .triton_gpu import filled_total, leanest_cut

# Tokens are chunked only if the logits would be larger than this ...
LOGITS_BYTES = 512 * 2**20
# ... and not into fewer tokens than this: every chunk reads and writes the gradient of the head
# once, in float32, which takes longer than its matmul when fewer tokens share it (v6e: 918 TFLOP/s
# over 1.6 TB/s, times 8 bytes over 2 FLOPs per token, is 2300 tokens; others need less).
MIN_TOKENS = 2048


class LossPlacement(Protocol):
    """Placement of arrays on a mesh; hashable, because a traced function is kept for each."""

    def place(self, x: jax.Array, *, groups: int, vocab: int | None = None) -> jax.Array:
        """Constrain `x` to the shardings of its dimensions of groups and vocabulary."""
        ...


class OneDevice:
    """The placement without a mesh."""

    def place(self, x: jax.Array, *, groups: int, vocab: int | None = None) -> jax.Array:
        """Return `x` unchanged."""
        return x


ONE_DEVICE = OneDevice()


def chunk_count(tokens: int, vocab: int, itemsize: int) -> int:
    """Return the number of chunks for one device's tokens; 1 means no chunking."""
    fewest = math.ceil(tokens * vocab * itemsize / LOGITS_BYTES)
    most = max(1, tokens // MIN_TOKENS)
    if fewest >= most:
        return most
    # A number that divides the tokens needs no padding.
    return next((n for n in range(fewest, most) if tokens % n == 0), fewest)


def cross_entropy_chunked(
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    *,
    z_loss: float = 0.0,
    soft_cap: float | None = None,
    reduction: Reduction = "mean",
) -> CrossEntropy:
    """Compute `cross_entropy` chunk by chunk."""
    tokens = x.shape[0]
    wide = jnp.dtype(jnp.promote_types(x.dtype, jnp.float32))
    is_filled = False
    if on_one_gpu():
        sizes = {"logit_bytes": wide.itemsize, "slope_bytes": x.dtype.itemsize}
        count, is_filled = leanest_cut(tokens, *w.shape, **sizes)
    else:
        count = chunk_count(tokens, w.shape[-1], wide.itemsize)

    terms = LossTerms(z_loss, soft_cap)
    if reduction == "none":
        losses, log_normaliser = tokenwise(x, w, labels, terms=terms, count=count)
        loss = losses * weights.astype(wide)
    else:
        # With the mean in the weights, gradients need no further factor.
        counted = weights if reduction == "sum" else weights_of_mean(weights.astype(wide))
        counted = counted.astype(wide)
        if is_filled:
            loss, log_normaliser = filled_total(x, w, labels, counted, terms, count)
        else:
            pieces = (_cut(x, count), w, _cut(labels, count), _cut(counted, count))
            loss, log_normaliser = weighted_total(*pieces, terms, ONE_DEVICE, wide)
            log_normaliser = log_normaliser.reshape(-1)[:tokens]
    return CrossEntropy(loss, jax.lax.stop_gradient(log_normaliser))


def tokenwise(
    x: jax.Array, w: jax.Array, labels: jax.Array, *, terms: LossTerms, count: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """Return losses and log-normalisers (T,) of tokens (T, d), in float32 or wider."""
    tokens = x.shape[0]
    if count is None:
        itemsize = jnp.promote_types(x.dtype, jnp.float32).itemsize
        count = chunk_count(tokens, w.shape[-1], itemsize)
    outputs = with_backward(
        partial(_token_losses, terms=terms),
        partial(token_gradients, terms),
        *(_cut(x, count), w, _cut(labels, count)),
    )
    losses, log_normaliser = (each.reshape(-1)[:tokens] for each in outputs)
    return losses, log_normaliser


def _cut(leaf: jax.Array, count: int) -> jax.Array:
    """Reshape (T, …) to (n, 1, c, …) with padding, which has no weight."""
    missing = -leaf.shape[0] % count
    room = ((0, missing), *((0, 0) for _ in leaf.shape[1:]))
    padded = jnp.pad(leaf, room) if missing else leaf
    return padded.reshape(count, 1, -1, *leaf.shape[1:])


def weighted_total(
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    terms: LossTerms,
    split: LossPlacement,
    logits_dtype: jnp.dtype,
    *,
    frozen: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Return the weighted sum of losses, and log-normalisers (n, g, c), which have no gradient.

    Args:
        x: (n, g, c, d) activations.
        w: (d, v) the output matrix.
        labels: (n, g, c).
        weights: (n, g, c) of the tokens.
        terms: The terms of the loss.
        split: Placement of the arrays.
        logits_dtype: Dtype that logits are rounded to; the softmax is computed in float32 or wider.
        frozen: Whether to skip the gradient of w, which is computed with the loss otherwise.
    """
    static = {"terms": terms, "split": split, "logits_dtype": logits_dtype}
    return with_backward(
        partial(_total_and_gradients, **static, frozen=frozen),
        _scale_gradients,
        *(x, w, labels, weights),
        result=partial(_total, **static),
    )


def _total(
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    *,
    terms: LossTerms,
    split: LossPlacement,
    logits_dtype: jnp.dtype,
) -> tuple[jax.Array, jax.Array]:
    copies = _copies(w, x.shape[1], split)

    def add_chunk(
        _: None, piece: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[None, tuple[jax.Array, jax.Array]]:
        x, labels, weights = piece
        losses, log_normaliser = terms.of_logits(_logits(x, copies, split, logits_dtype), labels)
        return None, ((losses * weights).sum(), log_normaliser)

    _, (totals, log_normaliser) = jax.lax.scan(add_chunk, None, (x, labels, weights))
    return totals.sum(), log_normaliser


Residuals = tuple[jax.Array, jax.Array | None, jax.Array]


def _total_and_gradients(
    x: jax.Array,
    w: jax.Array,
    labels: jax.Array,
    weights: jax.Array,
    *,
    terms: LossTerms,
    split: LossPlacement,
    logits_dtype: jnp.dtype,
    frozen: bool,
) -> tuple[tuple[jax.Array, jax.Array], Residuals]:
    copies = _copies(w, x.shape[1], split)

    def add_chunk(
        d_copies: jax.Array | None, piece: tuple[jax.Array, jax.Array, jax.Array]
    ) -> tuple[jax.Array | None, tuple[jax.Array, jax.Array, jax.Array]]:
        x, labels, weights = piece
        logits = _logits(x, copies, split, logits_dtype)
        if on_one_gpu() and triton_gpu.fits(logits):
            losses, log_normaliser, d_logits = triton_gpu.losses_and_slopes(
                logits, labels, weights, terms, dtype=x.dtype
            )
        else:
            losses, log_normaliser = terms.of_logits(logits, labels)
            d_logits = _slopes(x, logits, labels, log_normaliser, weights, terms, split)
        if frozen:
            return None, (losses, log_normaliser, _to_activations(copies, d_logits, split))
        d_x, more = _pull_back(x, copies, d_logits, split)
        more = more if d_copies is None else d_copies + more
        return split.place(more, groups=0, vocab=2), (losses, log_normaliser, d_x)

    pieces = (x, labels, weights)
    logits_bytes = x.shape[2] * w.shape[1] * logits_dtype.itemsize
    if on_one_gpu() and (x.shape[0] == 1 or 4 * w.size > logits_bytes):
        # The first chunk is separate: zeros to add it to, written and read again, would be the
        # largest array of all.
        d_copies, first = add_chunk(None, jax.tree.map(lambda leaf: leaf[0], pieces))
        later = jax.tree.map(lambda leaf: leaf[1:], pieces)
        d_copies, rest = jax.lax.scan(add_chunk, d_copies, later)
        losses, log_normaliser, d_x = (
            jnp.concatenate([head[None], tail]) for head, tail in zip(first, rest, strict=True)
        )
    else:
        nothing = None if frozen else _no_gradient(copies, split)
        d_copies, (losses, log_normaliser, d_x) = jax.lax.scan(add_chunk, nothing, pieces)
    d_w = None
    if d_copies is not None:
        d_w = _sum_of_copies(d_copies, w.dtype)
        # The layers' backward pass waits for this sum. Otherwise each device would keep its own, as
        # large as the head in float32, until the optimizer runs.
        d_x, d_w = jax.lax.optimization_barrier((d_x, d_w))
    total = (losses * weights).sum()
    return (total, log_normaliser), (d_x, d_w, losses)


def _scale_gradients(
    residuals: Residuals, factors: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array | None, None, jax.Array]:
    d_x, d_w, losses = jax.tree.map(lambda leaf: scaled([leaf], factors[0])[0], residuals)
    return d_x, d_w, None, losses


def _token_losses(
    x: jax.Array, w: jax.Array, labels: jax.Array, *, terms: LossTerms
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, ...]]:
    """Return losses and log-normalisers (n, 1, c); log-normalisers have no gradient."""
    copies = w[None]
    wide = jnp.promote_types(x.dtype, jnp.float32)

    def add_chunk(
        _: None, piece: tuple[jax.Array, jax.Array]
    ) -> tuple[None, tuple[jax.Array, jax.Array]]:
        return None, terms.of_logits(_logits(piece[0], copies, ONE_DEVICE, wide), piece[1])

    _, (losses, log_normaliser) = jax.lax.scan(add_chunk, None, (x, labels))
    return (losses, log_normaliser), (x, w, labels, log_normaliser)


def token_gradients(
    terms: LossTerms, residuals: tuple[jax.Array, ...], factors: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array, None]:
    """Return the gradients of `_token_losses`: of x (n, 1, c, d) and of w; labels have none."""
    x, w, labels, log_normaliser = residuals
    copies = w[None]

    def add_chunk(d_copies: jax.Array, piece: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        x, labels, log_normaliser, factor = piece
        logits = _logits(x, copies, ONE_DEVICE, log_normaliser.dtype)
        d_logits = _slopes(x, logits, labels, log_normaliser, factor, terms, ONE_DEVICE)
        d_x, more = _pull_back(x, copies, d_logits, ONE_DEVICE)
        return d_copies + more, d_x

    d_copies, d_x = jax.lax.scan(
        add_chunk, _no_gradient(copies, ONE_DEVICE), (x, labels, log_normaliser, factors[0])
    )
    return d_x, _sum_of_copies(d_copies, w.dtype), None


def _slopes(
    x: jax.Array,
    logits: jax.Array,
    labels: jax.Array,
    log_normaliser: jax.Array,
    factor: jax.Array,
    terms: LossTerms,
    split: LossPlacement,
) -> jax.Array:
    """Return the gradient of one chunk's logits, in the dtype of x."""
    is_label = jnp.arange(logits.shape[-1]) == labels[..., None]
    d_logits = terms.gradient(
        logits.astype(log_normaliser.dtype), is_label, log_normaliser[..., None], factor[..., None]
    )
    return split.place(d_logits.astype(x.dtype), groups=0, vocab=2)


def _pull_back(
    x: jax.Array, copies: jax.Array, d_logits: jax.Array, split: LossPlacement
) -> tuple[jax.Array, jax.Array]:
    """Return one chunk's gradients of x, and of the head's copies in float32 or wider."""
    precise = jnp.promote_types(copies.dtype, jnp.float32)
    d_x = _to_activations(copies, d_logits, split)
    more = jnp.einsum("gcd,gcv->gdv", x, d_logits, preferred_element_type=precise)
    return d_x, more


def _to_activations(copies: jax.Array, d_logits: jax.Array, split: LossPlacement) -> jax.Array:
    """Return one chunk's gradient of x."""
    return split.place(jnp.einsum("gcv,gdv->gcd", d_logits, copies), groups=0)


def _copies(w: jax.Array, groups: int, split: LossPlacement) -> jax.Array:
    """Copy the head for every group, so that it is gathered once and its gradients stay local."""
    return split.place(jnp.broadcast_to(w, (groups, *w.shape)), groups=0, vocab=2)


def _logits(
    x: jax.Array, copies: jax.Array, split: LossPlacement, dtype: jax.typing.DTypeLike
) -> jax.Array:
    logits = jnp.einsum("gcd,gdv->gcv", x, copies, preferred_element_type=dtype)
    return split.place(logits, groups=0, vocab=2)


def _no_gradient(copies: jax.Array, split: LossPlacement) -> jax.Array:
    precise = jnp.promote_types(copies.dtype, jnp.float32)
    return split.place(jnp.zeros_like(copies, dtype=precise), groups=0, vocab=2)


def _sum_of_copies(d_copies: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Sum over devices in the head's own dtype, as for every other weight's gradient."""
    return jax.lax.reduce(d_copies.astype(dtype), jnp.zeros((), dtype), jax.lax.add, (0,))

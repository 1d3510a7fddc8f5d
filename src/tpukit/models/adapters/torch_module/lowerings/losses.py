"""Losses: that of a vocabulary by our kernel, others because torchax lacks or mistakes them."""

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax

from .....kernels.ops.cross_entropy.api import cross_entropy
from .....kernels.ops.cross_entropy.terms import Reduction

# optax adds up logarithms with this in place of minus infinity; a loss this large means that no
# alignment exists, for which torch gives infinity.
_NO_ALIGNMENT = 5e4


def lowerings() -> dict[Any, Any]:
    """Return what is lowered here: torch's function -> its counterpart on arrays."""
    import torch.nn.functional as functional

    found: dict[Any, Any] = {
        functional.gaussian_nll_loss: gaussian_loss,
        functional.multilabel_margin_loss: margin_of_labels,
        functional.ctc_loss: alignment_loss,
    }
    # Only newer versions of torch have it.
    if hasattr(functional, "linear_cross_entropy"):
        found[functional.linear_cross_entropy] = vocabulary_loss
    return found


def vocabulary_loss(
    input: jax.Array,
    linear_weight: jax.Array,
    target: jax.Array,
    *,
    linear_bias: jax.Array | None = None,
    reduction: Reduction = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    **options: Any,
) -> jax.Array:
    """Compute the loss of `input @ linear_weight.T` without all of its logits at once."""
    del options  # how torch itself cuts the logits into pieces
    if linear_bias is not None or label_smoothing or jnp.issubdtype(target.dtype, jnp.floating):
        raise NotImplementedError(
            "linear_cross_entropy with a bias, smoothed labels or class probabilities; "
            "use linear and cross_entropy."
        )
    labels = jnp.where(target == ignore_index, -1, target)
    return cross_entropy(input, linear_weight.T, labels, reduction=reduction).loss


def gaussian_loss(
    input: jax.Array,
    target: jax.Array,
    var: jax.Array | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: Reduction = "mean",
) -> jax.Array:
    """Compute the likelihood of a target under a normal distribution with variance `var`.

    Eager torch looks for negative variances and raises; a program cannot, and takes `eps` there.
    """
    spread = jnp.asarray(var, input.dtype)
    if spread.ndim and spread.shape == input.shape[:-1]:
        spread = spread[..., None]
    # The gradient passes the clamp as if it were not there.
    spread = spread + jax.lax.stop_gradient(jnp.maximum(spread, eps) - spread)
    loss = 0.5 * (jnp.log(spread) + (input - target) ** 2 / spread)
    return _reduced(loss + (0.5 * math.log(2 * math.pi) if full else 0), reduction)


def margin_of_labels(
    input: jax.Array,
    target: jax.Array,
    size_average: Any = None,
    reduce: Any = None,
    reduction: Reduction = "mean",
) -> jax.Array:
    """Compare each label's score with that of every class which is no label of the example.

    Labels of an example end at the first -1.
    """
    del size_average, reduce  # older words for `reduction`, which torch has translated
    given = jnp.cumprod(target >= 0, axis=-1).astype(bool)
    classes = input.shape[-1]
    labels = jnp.where(given, target, 0)
    chosen = (jax.nn.one_hot(labels, classes, dtype=bool) & given[..., None]).any(-2)
    scores = jnp.take_along_axis(input, labels, axis=-1)
    short = jax.nn.relu(1 - scores[..., :, None] + input[..., None, :])
    counted = given[..., :, None] & ~chosen[..., None, :]
    return _reduced(jnp.where(counted, short, 0).sum((-2, -1)) / classes, reduction)


def alignment_loss(
    log_probs: jax.Array,
    targets: jax.Array,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    reduction: Literal["mean", "sum", "none"] = "mean",
    zero_infinity: bool = False,
) -> jax.Array:
    """Sum over all alignments of labels with steps, as `ctc_loss` does."""
    if targets.ndim != log_probs.ndim - 1:
        raise NotImplementedError(
            "ctc_loss with the labels of all examples in one row; pass one row an example."
        )
    single = log_probs.ndim == 2
    logits = log_probs[None] if single else log_probs.swapaxes(0, 1)
    labels = targets[None] if single else targets
    steps, wanted = (
        jnp.broadcast_to(jnp.asarray(one), logits.shape[:1])
        for one in (input_lengths, target_lengths)
    )
    late = jnp.arange(logits.shape[1]) >= steps[:, None]
    past = jnp.arange(labels.shape[1]) >= wanted[:, None]
    loss = optax.ctc_loss(
        logits, late.astype(logits.dtype), labels, past.astype(logits.dtype), blank_id=blank
    )
    loss = jnp.where(loss > _NO_ALIGNMENT, 0 if zero_infinity else jnp.inf, loss)
    if reduction == "mean":
        loss = loss / jnp.maximum(wanted, 1)
    return _reduced(loss[0] if single else loss, reduction)


def _reduced(loss: jax.Array, reduction: str) -> jax.Array:
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss

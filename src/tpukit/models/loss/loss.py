"""Next-token cross-entropy in float32, with masked labels and an optional z-loss."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ...errors import TPUModelError
from ...kernels.ops.cross_entropy.terms import LossTerms

Batch = Mapping[str, jax.Array]


class WeightedLoss(NamedTuple):
    """A sum of losses and of their weights; the loss is `total / weight`.

    Keeping the two apart makes a step that is cut into micro-batches equal the uncut one even
    when the pieces hold different numbers of unmasked tokens.
    """

    total: jax.Array
    weight: jax.Array


# (outputs of the model, batch) -> a mean loss, or a sum and its weight.
LossFunction = Callable[[Any, Batch], "jax.Array | WeightedLoss"]


def next_token_loss(logits: jax.Array, targets: jax.Array, *, z_loss: float = 0.0) -> WeightedLoss:
    """Cross-entropy of `logits` (..., V) against `targets` (...).

    Args:
        logits: Any float type; the loss is computed in at least float32.
        targets: The token that comes next; a negative number takes the place out of the loss.
        z_loss: Weight of the squared log of the softmax's normaliser, which keeps logits small.
    """
    losses, _ = LossTerms(z_loss).of_logits(logits, targets)
    counted = (targets >= 0).astype(losses.dtype)
    return WeightedLoss(jnp.sum(losses * counted), jnp.sum(counted))


def token_targets(batch: Batch, shape: tuple[int, ...]) -> jax.Array | None:
    """`batch["targets"]` if they are token numbers for every place of `shape`."""
    targets = batch.get("targets")
    if targets is None or targets.shape != shape:
        return None
    return targets if jnp.issubdtype(targets.dtype, jnp.integer) else None


def default_loss(outputs: Any, batch: Batch, *, z_loss: float = 0.0) -> jax.Array | WeightedLoss:
    """A scalar output is the loss itself; logits are compared with `batch["targets"]`."""
    if isinstance(outputs, WeightedLoss):
        return outputs
    if isinstance(outputs, jax.Array):
        if outputs.ndim == 0:
            return outputs
        targets = token_targets(batch, outputs.shape[:-1])
        if targets is not None:
            return next_token_loss(outputs, targets, z_loss=z_loss)
    shapes = jax.tree.map(jnp.shape, outputs)
    raise TPUModelError(
        f"the model returns {shapes} and no loss was given; pass loss=lambda outputs, batch: … "
        "(without one, the model must return a scalar, or logits for integer batch['targets'])."
    )

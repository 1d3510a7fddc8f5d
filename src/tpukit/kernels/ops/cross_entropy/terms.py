"""The loss of a token from its logits, and its gradient: the formulas that all paths share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from ...partition.splits import Axes, add_up

Reduction: TypeAlias = Literal["none", "sum", "mean"]


class CrossEntropy(NamedTuple):
    """The loss, and the log of each token's softmax normaliser, which has no gradient."""

    loss: jax.Array
    log_normaliser: jax.Array


@dataclass(frozen=True)
class LossTerms:
    """The terms of the loss.

    Attributes:
        z_loss: Weight of the squared log of the softmax's normaliser, which keeps logits small.
        soft_cap: Logits are squeezed into ±soft_cap by a tanh before the softmax.
    """

    z_loss: float = 0.0
    soft_cap: float | None = None

    def capped(self, logits: jax.Array) -> jax.Array:
        """Return the logits after the soft cap."""
        if self.soft_cap is None:
            return logits
        return self.soft_cap * jnp.tanh(logits / self.soft_cap)

    def from_normaliser(self, log_normaliser: jax.Array, chosen: jax.Array) -> jax.Array:
        """Return the losses of tokens from their normaliser and the capped logit of their label."""
        losses = log_normaliser - chosen
        if self.z_loss:
            losses = losses + self.z_loss * log_normaliser**2
        return losses

    def of_logits(self, logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return losses and log-normalisers (...) of logits (..., V), in float32 or wider."""
        wide = self.capped(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)))
        log_normaliser = jax.nn.logsumexp(wide, axis=-1)
        # A comparison instead of a gather stays local when the vocabulary is sharded.
        is_label = jnp.arange(wide.shape[-1]) == labels[..., None]
        chosen = jnp.sum(jnp.where(is_label, wide, 0), axis=-1)
        return self.from_normaliser(log_normaliser, chosen), log_normaliser

    def gradient(
        self,
        logits: jax.Array,
        is_label: jax.Array,
        log_normaliser: jax.Array,
        factor: jax.Array,
    ) -> jax.Array:
        """Return the gradient of `factor · loss` with respect to uncapped logits (tokens, V).

        Args:
            logits: In float32 or wider.
            is_label: Whether a column is the token's label, in the shape of `logits`.
            log_normaliser: One per token, broadcastable to `logits`.
            factor: One per token, broadcastable to `logits`.
        """
        capped = self.capped(logits)
        pull = factor * (1 + 2 * self.z_loss * log_normaliser) if self.z_loss else factor
        slope = pull * jnp.exp(capped - log_normaliser) - jnp.where(is_label, factor, 0)
        if self.soft_cap is None:
            return slope
        return slope * (1 - (capped / self.soft_cap) ** 2)


def reduce_losses(
    losses: jax.Array, weights: jax.Array, reduction: Reduction, *, over: Axes = ()
) -> jax.Array:
    """Weight and reduce the tokens' losses; a mean over zero weight is zero.

    Where tokens are sharded `over` mesh axes, the sums are those of all devices.
    """
    weighted = losses * weights
    if reduction == "none":
        return weighted
    total = add_up(weighted.sum(), over)
    return total if reduction == "sum" else total / _sum(weights, over)


def weights_of_mean(weights: jax.Array) -> jax.Array:
    """Return weights whose weighted sum is the mean."""
    return weights / _sum(weights)


def _sum(weights: jax.Array, over: Axes = ()) -> jax.Array:
    weight = add_up(weights.sum(), over)
    return jnp.where(weight == 0, 1, weight)


def scaled(gradients: Sequence[jax.Array], factor: jax.Array) -> list[jax.Array]:
    """Multiply gradients by the loss's cotangent, each in its own dtype."""
    return [(gradient * factor).astype(gradient.dtype) for gradient in gradients]

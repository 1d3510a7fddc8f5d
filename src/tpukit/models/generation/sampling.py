"""How the next token is chosen from its logits."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ...errors import TPUValidationError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """A temperature, and which tokens stand for choice.

    Attributes:
        temperature: Divides the logits; 0 takes the likeliest token.
        top_k: Only the `top_k` likeliest tokens; None for all.
        top_p: Only the likeliest tokens that together hold this much probability, after the
            temperature; at least one. None for all.
        seed: The same seed, prompts and settings give the same tokens.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise TPUValidationError(
                f"temperature={self.temperature}; use 0 for the likeliest token, or a positive "
                "number, 1 for the model's own distribution."
            )
        if self.top_k is not None and self.top_k < 1:
            raise TPUValidationError(f"top_k={self.top_k}; keep at least 1 token, or None for all.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise TPUValidationError(
                f"top_p={self.top_p}; a share of the probability is above 0 and at most 1."
            )
        if not 0 <= self.seed < 2**32:
            raise TPUValidationError(f"seed={self.seed}; use a number from 0 to 2**32 - 1.")

    def choose(self, logits: jax.Array, keys: jax.Array) -> jax.Array:
        """One token (rows,) for each row of logits (rows, V), each with its own random key."""
        if self.temperature == 0:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        wide = logits.astype(jnp.float32) / self.temperature
        wide = keep_likeliest(wide, top_k=self.top_k, top_p=self.top_p)
        return jax.vmap(jax.random.categorical)(keys, wide).astype(jnp.int32)


def keep_likeliest(logits: jax.Array, *, top_k: int | None, top_p: float | None) -> jax.Array:
    """The logits, -inf where a token is not among the likeliest; equals of the last one stay."""
    kept = logits
    if top_k is not None and top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, top_k)[0][..., -1:]
        kept = jnp.where(logits < least, -jnp.inf, kept)
    if top_p is not None and top_p < 1:
        ordered = jnp.sort(kept, axis=-1, descending=True)
        shares = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(shares, axis=-1) - shares
        # A token counts while those before it do not reach the share: the first always does.
        least = jnp.min(jnp.where(before < top_p, ordered, jnp.inf), axis=-1, keepdims=True)
        kept = jnp.where(kept < least, -jnp.inf, kept)
    return kept

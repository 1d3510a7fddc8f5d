"""Attention in numpy, from its definition and in float64: what everything here is judged by."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

# Which of (batch, heads, queries, keys) a mask has an axis for; the others broadcast.
SHAPES = {
    "all": (True, True, True, True),
    "no_heads": (True, False, True, True),
    "scores": (False, False, True, True),
    "heads": (False, True, True, True),
    "keys": (True, False, False, True),
    "keys_of_heads": (True, True, False, True),
    "queries": (True, False, True, False),
}


class Judge:
    """Makes arrays and masks, and compares both passes with the truth."""

    kinds = tuple(SHAPES)

    def arrays(
        self, batch: int, q_len: int, kv_len: int, heads: int, kv_heads: int, width: int, dtype: str
    ) -> list[jax.Array]:
        """Queries, keys, values and a cotangent."""
        random = np.random.default_rng(0)
        of_q, of_k = (batch, q_len, heads, width), (batch, kv_len, kv_heads, width)
        return [jnp.asarray(random.standard_normal(s), dtype) for s in (of_q, of_k, of_k, of_q)]

    def mask(self, kind: str, scores: tuple[int, ...], share: float = 0.6) -> np.ndarray:
        """A random one, that leaves the third query no key where queries have rows of their own."""
        shape = tuple(size if own else 1 for size, own in zip(scores, SHAPES[kind], strict=True))
        mask = np.random.default_rng(1).random(shape) < share
        if shape[2] > 2:
            mask[:, :, 2] = False
        return mask

    def near(
        self, q_len: int, kv_len: int, *, causal: bool = False, window: int | None = None
    ) -> np.ndarray:
        """Which scores count by their positions."""
        distance = np.arange(q_len)[:, None] - np.arange(kv_len)
        allowed = distance >= 0 if causal else np.ones_like(distance, bool)
        return allowed if window is None else allowed & (abs(distance) < window)

    def truth(
        self, arrays: list[jax.Array], allowed: Any, soft_cap: float | None = None
    ) -> list[np.ndarray]:
        """The result and the gradients of q, k and v."""
        q, k, v, pull = (np.asarray(x, np.float64).swapaxes(1, 2) for x in arrays)
        group, scale = q.shape[1] // k.shape[1], q.shape[-1] ** -0.5
        k, v = (x.repeat(group, axis=1) for x in (k, v))
        scores = q @ k.swapaxes(-1, -2) * scale
        slope = np.ones_like(scores)
        if soft_cap is not None:
            scores = np.tanh(scores / soft_cap) * soft_cap
            slope = 1 - (scores / soft_cap) ** 2
        allowed = np.broadcast_to(allowed, scores.shape)
        highest = np.where(allowed, scores, -1e300).max(-1, keepdims=True)
        weights = np.where(allowed, np.exp(np.where(allowed, scores - highest, 0)), 0)
        weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-300)
        out = weights @ v
        dweights = pull @ v.swapaxes(-1, -2)
        dscores = weights * (dweights - (pull * out).sum(-1, keepdims=True)) * slope * scale
        dk, dv = dscores.swapaxes(-1, -2) @ q, weights.swapaxes(-1, -2) @ pull
        dk, dv = (x.reshape(len(x), -1, group, *x.shape[2:]).sum(2) for x in (dk, dv))
        return [x.swapaxes(1, 2) for x in (out, dscores @ k, dk, dv)]

    def passes(self, function: Any, arrays: list[jax.Array]) -> list[np.ndarray]:
        """The same of a function of q, k and v."""
        *inputs, cotangent = arrays
        out, pull = jax.vjp(function, *inputs)
        return [np.asarray(x, np.float64) for x in (out, *pull(cotangent))]

    def agree(self, seen: list[np.ndarray], wanted: list[np.ndarray], tolerance: float) -> None:
        """Fail where the largest error is more than this share of the largest value, or of 0.1."""
        for name, a, b in zip(("out", "dq", "dk", "dv"), seen, wanted, strict=True):
            assert a.shape == b.shape, name
            assert np.isfinite(a).all(), name
            assert np.abs(a - b).max() <= tolerance * max(np.abs(b).max(), 0.1), name


@pytest.fixture(scope="session")
def judge() -> Judge:
    return Judge()

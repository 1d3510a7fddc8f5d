"""Whether a quantized language model still writes what the full one would.

Rotated 2-bit models keep their likelihood of given text and fail at writing (Bielik-Q2, 2026), so
likelihood alone proves little. Both models continue the same prompts, drawing with the same seed;
the full model then reads both texts. The score is its perplexity of its own text over its
perplexity of the quantized model's: 1 where nothing was lost.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ...models.generation import Generator, Sampling
from ..subject import Subject
from .evaluation import CONFIDENCE, RESAMPLES, Measured

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 32, 16, 32


def generation_score(
    subject: Subject, params: Any, batches: Sequence[Any]
) -> tuple[Measured | None, str]:
    """The score, or None and why there is none.

    Args:
        subject: The full model.
        params: The quantized model's.
        batches: Held-out text that prompts are cut from.
    """
    if subject.config is None:
        return None, "not measured: only reference transformers generate here"
    rows = np.concatenate([np.asarray(batch["inputs"]) for batch in batches])[:PROMPTS]
    length = min(PROMPT_TOKENS, rows.shape[1] // 2)
    room = subject.config.max_seq_len - length
    if length < 1 or room < 2:
        return None, "not measured: held-out rows are too short to continue"
    prompts, new = rows[:, :length], min(NEW_TOKENS, room)
    losses = [
        _losses(subject, prompts, _written(subject, given, prompts, new), length)
        for given in (subject.params, params)
    ]
    draws = np.random.default_rng(0).integers(0, len(rows), (RESAMPLES, len(rows)))
    lost = losses[0] - losses[1]
    edge = (1 - CONFIDENCE) / 2
    low, high = np.quantile(np.exp(lost[draws].mean(axis=1)), (edge, 1 - edge))
    return Measured(float(np.exp(lost.mean())), float(low), float(high)), ""


def _written(subject: Subject, params: Any, prompts: np.ndarray, new: int) -> np.ndarray:
    made = Generator(subject.config, params).generate(
        prompts, max_new_tokens=new, sampling=Sampling(temperature=1.0, seed=1)
    )
    return np.asarray(made.tokens, np.int32)


def _losses(subject: Subject, prompts: np.ndarray, text: np.ndarray, length: int) -> np.ndarray:
    """The full model's mean loss of each row's text."""
    whole = jnp.asarray(np.concatenate([prompts, text], axis=1))
    logits = jax.jit(subject.apply)(subject.params, {"inputs": whole})
    logs = jax.nn.log_softmax(logits[:, length - 1 : -1].astype(jnp.float32), axis=-1)
    found = -jnp.take_along_axis(logs, whole[:, length:, None], axis=-1)[..., 0]
    return np.asarray(found.mean(axis=1), np.float64)

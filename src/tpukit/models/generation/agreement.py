"""Whether a generator would have chosen the tokens of a text itself, one by one."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from .decoding import Sampling, random_keys
from .generator import Generator


def same_choices(
    generator: Generator,
    prompt: Sequence[int],
    tokens: Sequence[int],
    sampling: Sampling,
    *,
    row: int = 0,
) -> np.ndarray:
    """(tokens,) whether each is what the generator chooses after the prompt and those before it.

    Args:
        generator: Whose choices they may be.
        prompt: Before them.
        tokens: The text.
        sampling: How tokens are chosen, with its seed.
        row: Of the batch that they were drawn in.
    """
    logits = generator.follow([prompt], np.asarray([tokens]))[0]
    positions = jnp.arange(len(prompt), len(prompt) + len(tokens))
    keys = random_keys(jnp.uint32(sampling.seed), positions, rows=jnp.full(len(tokens), row))
    return np.asarray(sampling.choose(jnp.asarray(logits), keys)) == np.asarray(tokens)

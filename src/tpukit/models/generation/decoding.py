"""What runs on the device: prompts are read at once, then tokens are added in one loop."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..transformer.config import TransformerConfig
from .cache import KVCache
from .forward import read_prompts, read_token
from .sampling import Sampling


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodingState:
    """Everything between two tokens: `tokens` (rows, slots) hold prompts and what follows."""

    tokens: jax.Array
    positions: jax.Array  # (rows,) of the newest token
    done: jax.Array  # (rows,)
    steps: jax.Array  # new tokens so far
    cache: KVCache


def begin_rows(
    params: Any,
    tokens: jax.Array,
    lengths: jax.Array,
    eos: jax.Array,
    seed: jax.Array,
    *,
    config: TransformerConfig,
    sampling: Sampling,
    slots: int,
) -> DecodingState:
    """Read the prompts and choose the first new token of each."""
    logits, cache = read_prompts(config, params, tokens, lengths, slots=slots)
    first = sampling.choose(logits, _keys(seed, lengths))
    rows = jnp.arange(tokens.shape[0])
    room = jnp.zeros((tokens.shape[0], slots), jnp.int32).at[:, : tokens.shape[1]].set(tokens)
    return DecodingState(
        tokens=room.at[rows, lengths].set(first),
        positions=lengths,
        done=first == eos,
        steps=jnp.ones((), jnp.int32),
        cache=cache,
    )


def extend_rows(
    params: Any,
    state: DecodingState,
    until: jax.Array,
    eos: jax.Array,
    seed: jax.Array,
    *,
    config: TransformerConfig,
    sampling: Sampling,
) -> DecodingState:
    """Add tokens until there are `until` new ones, or every row has ended."""
    rows = jnp.arange(state.tokens.shape[0])

    def unfinished(now: DecodingState) -> jax.Array:
        return (now.steps < until) & ~jnp.all(now.done)

    def one_more(now: DecodingState) -> DecodingState:
        newest = now.tokens[rows, now.positions]
        logits, cache = read_token(config, params, newest, now.positions, now.cache)
        positions = now.positions + 1
        chosen = jnp.where(now.done, eos, sampling.choose(logits, _keys(seed, positions)))
        return DecodingState(
            tokens=now.tokens.at[rows, positions].set(chosen),
            positions=positions,
            done=now.done | (chosen == eos),
            steps=now.steps + 1,
            cache=cache,
        )

    return jax.lax.while_loop(unfinished, one_more, state)


def _keys(seed: jax.Array, positions: jax.Array) -> jax.Array:
    """A key for each row and position: what a row draws does not depend on when it is asked."""
    rows = jnp.arange(positions.shape[0])

    def one(row: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), row), position)

    return jax.vmap(one)(rows, positions)

"""What runs on the device: prompts are read at once, then tokens are chosen in one loop."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ...errors import TPUValidationError
from ..execution import Execution
from ..transformer.config import TransformerConfig
from .cache import Cache, CacheSpec, Place, in_place, place_cache
from .forward import read_prompts, read_token


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


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodingState:
    """Everything between two tokens: `tokens` (rows, slots) hold prompts and what follows."""

    tokens: jax.Array
    positions: jax.Array  # (rows,) of the newest token
    done: jax.Array  # (rows,)
    steps: jax.Array  # new tokens so far
    cache: Cache

    def placed(self, place: Place = in_place) -> "DecodingState":
        """The state with every leaf placed by what its dimensions are."""
        return DecodingState(
            tokens=place(self.tokens, "batch", None),
            positions=place(self.positions, "batch"),
            done=place(self.done, "batch"),
            steps=place(self.steps),
            cache=place_cache(self.cache, place),
        )


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
    execution: Execution,
    kv: CacheSpec | None = None,
) -> DecodingState:
    """Read the prompts and choose the first new token of each; rows without a prompt are done."""
    logits, cache = read_prompts(
        config, params, tokens, lengths, slots=slots, execution=execution, kv=kv
    )
    first = sampling.choose(logits, random_keys(seed, lengths))
    rows = jnp.arange(tokens.shape[0])
    room = jnp.zeros((tokens.shape[0], slots), jnp.int32).at[:, : tokens.shape[1]].set(tokens)
    return DecodingState(
        tokens=room.at[rows, lengths].set(first),
        positions=lengths,
        done=jnp.isin(first, eos) | (lengths == 0),
        steps=jnp.ones((), jnp.int32),
        cache=cache,
    ).placed()


def extend_rows(
    params: Any,
    state: DecodingState,
    until: jax.Array,
    eos: jax.Array,
    seed: jax.Array,
    *,
    config: TransformerConfig,
    sampling: Sampling,
    execution: Execution,
    kv: CacheSpec | None = None,
    turn: int = 1,
) -> DecodingState:
    """Add tokens until there are `until` new ones, or every row has ended.

    Whether to go on is asked once a `turn` of so many tokens, and once a token for the last few.
    Rows that all end within a turn are filled up to its end.
    """
    rows = jnp.arange(state.tokens.shape[0])

    def has_room(now: DecodingState, tokens: int) -> jax.Array:
        return (now.steps + tokens <= until) & ~jnp.all(now.done)

    def one_more(now: DecodingState) -> DecodingState:
        newest = now.tokens[rows, now.positions]
        logits, cache = read_token(
            config,
            params,
            newest,
            now.positions,
            now.cache,
            slots=now.tokens.shape[1],
            execution=execution,
            kv=kv,
        )
        positions = now.positions + 1
        chosen = jnp.where(now.done, eos[0], sampling.choose(logits, random_keys(seed, positions)))
        return DecodingState(
            tokens=now.tokens.at[rows, positions].set(chosen),
            positions=positions,
            done=now.done | jnp.isin(chosen, eos),
            steps=now.steps + 1,
            cache=cache,
        ).placed()

    def one_turn(now: DecodingState) -> DecodingState:
        return jax.lax.fori_loop(0, turn, lambda _, one: one_more(one), now)

    state = state.placed()
    if turn > 1:
        state = jax.lax.while_loop(lambda now: has_room(now, turn), one_turn, state)
    return jax.lax.while_loop(lambda now: has_room(now, 1), one_more, state)


def follow_rows(
    params: Any,
    tokens: jax.Array,
    lengths: jax.Array,
    following: jax.Array,
    *,
    config: TransformerConfig,
    slots: int,
    execution: Execution,
    kv: CacheSpec | None = None,
) -> jax.Array:
    """Logits (rows, steps, V) before each token of `following` (rows, steps), one by one.

    What `extend_rows` would choose from, were these the tokens it had chosen.
    """
    first, cache = read_prompts(
        config, params, tokens, lengths, slots=slots, execution=execution, kv=kv
    )

    def one_more(cache: Cache, now: tuple[jax.Array, jax.Array]) -> tuple[Cache, jax.Array]:
        token, position = now
        logits, cache = read_token(
            *(config, params, token, position, cache), slots=slots, execution=execution, kv=kv
        )
        return place_cache(cache), logits

    steps = following.shape[1] - 1
    positions = lengths + jnp.arange(steps)[:, None]
    _, rest = jax.lax.scan(one_more, place_cache(cache), (following[:, :-1].T, positions))
    return jnp.concatenate([first[:, None], jnp.moveaxis(rest, 0, 1)], axis=1)


def random_keys(seed: jax.Array, positions: jax.Array, rows: jax.Array | None = None) -> jax.Array:
    """A key for each row and position: what a row draws does not depend on when it is asked."""
    rows = jnp.arange(positions.shape[0]) if rows is None else rows

    def one(row: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), row), position)

    return jax.vmap(one)(rows, positions)

"""The device programs of generation: prefill of prompts, then a loop that samples tokens."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from ...annotations import PyTree
from ...errors import TPUValidationError
from ..execution import Execution
from ..transformer.config import TransformerConfig
from .cache import Cache, CacheSpec, Place, in_place, place_cache
from .forward import read_prompts, read_token


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling settings.

    Attributes:
        temperature: Divides the logits; 0 takes the likeliest token.
        top_k: Sample from the `top_k` likeliest tokens; None for all.
        top_p: Sample from the likeliest tokens that together have this probability, after the
            temperature, at least one; None for all.
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
            raise TPUValidationError(f"top_k={self.top_k}; expected at least 1, or None for all.")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise TPUValidationError(
                f"top_p={self.top_p}; expected a probability above 0 and at most 1."
            )
        if not 0 <= self.seed < 2**32:
            raise TPUValidationError(f"seed={self.seed}; expected a number from 0 to 2**32 - 1.")

    def choose(self, logits: jax.Array, keys: jax.Array) -> jax.Array:
        """Return one token (rows,) per row of logits (rows, V), each with its own random key."""
        if self.temperature == 0:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        wide = logits.astype(jnp.float32) / self.temperature
        wide = keep_likeliest(wide, top_k=self.top_k, top_p=self.top_p)
        return jax.vmap(jax.random.categorical)(keys, wide).astype(jnp.int32)


def keep_likeliest(logits: jax.Array, *, top_k: int | None, top_p: float | None) -> jax.Array:
    """Return the logits with -inf for tokens that are not among the likeliest; ties are kept."""
    kept = logits
    if top_k is not None and top_k < logits.shape[-1]:
        least = jax.lax.top_k(logits, top_k)[0][..., -1:]
        kept = jnp.where(logits < least, -jnp.inf, kept)
    if top_p is not None and top_p < 1:
        ordered = jnp.sort(kept, axis=-1, descending=True)
        shares = jax.nn.softmax(ordered, axis=-1)
        before = jnp.cumsum(shares, axis=-1) - shares
        # A token is kept while the tokens before it have less than top_p, so the first always is.
        least = jnp.min(jnp.where(before < top_p, ordered, jnp.inf), axis=-1, keepdims=True)
        kept = jnp.where(kept < least, -jnp.inf, kept)
    return kept


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class DecodingState:
    """The state between two tokens; `tokens` (rows, slots) has prompts and new tokens."""

    tokens: jax.Array
    positions: jax.Array  # (rows,) of the newest token
    done: jax.Array  # (rows,)
    steps: jax.Array  # new tokens so far
    cache: Cache

    def placed(self, place: Place = in_place) -> "DecodingState":
        """Return the state with every leaf placed by the names of its dimensions."""
        return DecodingState(
            tokens=place(self.tokens, "batch", None),
            positions=place(self.positions, "batch"),
            done=place(self.done, "batch"),
            steps=place(self.steps),
            cache=place_cache(self.cache, place),
        )


def begin_rows(
    params: PyTree,
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
    """Prefill the prompts and sample the first token of each; rows without a prompt are done."""
    logits, cache = read_prompts(
        config, params, tokens, lengths, slots=slots, execution=execution, kv=kv
    )
    first = sampling.choose(logits, random_keys(seed, lengths))
    rows = jnp.arange(tokens.shape[0])
    padded = jnp.zeros((tokens.shape[0], slots), jnp.int32).at[:, : tokens.shape[1]].set(tokens)
    return DecodingState(
        tokens=padded.at[rows, lengths].set(first),
        positions=lengths,
        done=jnp.isin(first, eos) | (lengths == 0),
        steps=jnp.ones((), jnp.int32),
        cache=cache,
    ).placed()


def extend_rows(
    params: PyTree,
    state: DecodingState,
    until: jax.Array,
    eos: jax.Array,
    seed: jax.Array,
    *,
    config: TransformerConfig,
    sampling: Sampling,
    execution: Execution,
    kv: CacheSpec | None = None,
    tokens_per_check: int = 1,
) -> DecodingState:
    """Add tokens until there are `until` new ones, or every row has ended.

    The condition is checked every `tokens_per_check` tokens, and every token for the last few. If
    all rows end between two checks, they are padded with end tokens up to the next check.
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

    def one_group(now: DecodingState) -> DecodingState:
        return jax.lax.fori_loop(0, tokens_per_check, lambda _, one: one_more(one), now)

    state = state.placed()
    if tokens_per_check > 1:
        state = jax.lax.while_loop(lambda now: has_room(now, tokens_per_check), one_group, state)
    return jax.lax.while_loop(lambda now: has_room(now, 1), one_more, state)


def follow_rows(
    params: PyTree,
    tokens: jax.Array,
    lengths: jax.Array,
    following: jax.Array,
    *,
    config: TransformerConfig,
    slots: int,
    execution: Execution,
    kv: CacheSpec | None = None,
) -> jax.Array:
    """Return logits (rows, steps, V) before each token of `following` (rows, steps).

    These are the logits that `extend_rows` would sample from if it had sampled these tokens.
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
    """Return a random key per row and position, independent of the batch and the step."""
    rows = jnp.arange(positions.shape[0]) if rows is None else rows

    def key_of(row: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), row), position)

    return jax.vmap(key_of)(rows, positions)

"""`generate`: prompts in, new tokens out, through two compiled programs of fixed shapes."""

import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import ArrayLike
from rich.table import Table

from ...annotations import PyTree
from ...errors import TPUModelError, TPUValidationError
from ...hardware.stored_formats import CacheFormat
from ...plain_data import JsonObject
from ...shown import Shown
from ..presets import get_preset
from ..stored.parameter import is_stored
from ..transformer.config import TransformerConfig
from .cache import CacheSpec
from .decoding import DecodingState, Sampling, random_keys
from .programs import DecodingPrograms, rounded_size

Ending = Literal["end", "length", "stop"]


@dataclass(frozen=True, kw_only=True)
class Generation(Shown):
    """New tokens for every prompt. Times are measured on this machine.

    Attributes:
        tokens: The new tokens of each row, without the end token.
        ended: Why each row stopped: an end token, a stop word, or the maximum length.
        prompt_lengths: Tokens of each prompt.
        compile_s: Seconds of compilation; 0 where the programs were compiled already.
        prompt_s: Seconds of the prefill, up to the first new token.
        decode_s: Seconds of all later tokens.
        decode_steps: Later tokens of the longest row; each took one pass over the model.
    """

    tokens: tuple[tuple[int, ...], ...]
    ended: tuple[Ending, ...]
    prompt_lengths: tuple[int, ...]
    compile_s: float
    prompt_s: float
    decode_s: float
    decode_steps: int

    @property
    def step_time_s(self) -> float | None:
        """Seconds per token and row, or None with one new token only."""
        return self.decode_s / self.decode_steps if self.decode_steps else None

    def to_dict(self) -> JsonObject:
        """Plain data."""
        return {
            "tokens": [list(row) for row in self.tokens],
            "ended": list(self.ended),
            "prompt_lengths": list(self.prompt_lengths),
            "compile_s": self.compile_s,
            "prompt_s": self.prompt_s,
            "decode_s": self.decode_s,
            "step_time_s": self.step_time_s,
            "origin": "measured",
        }

    def __rich__(self) -> Table:
        table = Table("row", "prompt", "new tokens", "stopped at", title=self._headline())
        for row, (new, ended) in enumerate(zip(self.tokens, self.ended, strict=True)):
            table.add_row(str(row), str(self.prompt_lengths[row]), str(len(new)), ended)
        return table

    def _headline(self) -> str:
        step = self.step_time_s
        speed = "" if step is None else f", {len(self.tokens) / step:,.0f} tokens/s"
        return f"prompt {self.prompt_s * 1e3:,.0f} ms{speed} (measured)"


NO_END = -1  # a token that no model has
Prompts: TypeAlias = Iterable[ArrayLike | Sequence[int]]  # rows of token numbers


class Generator:
    """Generates from one model; programs are compiled once per prompt and cache size.

    Sizes are rounded up to powers of two, so that prompts of similar length share a program.

    Args:
        model: A preset's name, a `TransformerConfig`, or a `Workload` of one.
        params: Its parameters: `TrainState.params`, `ImportedModel.params` or
            `QuantizedModel.params`. Their sharding on a mesh is kept, and caches are sharded by
            rows and heads.
        loop: Whether layers are a scan; see `DecodingPrograms`. Quantized layers always are.
        kv: The format of keys, values and latents: "bf16", "fp8", "int8", "int4", or a `CacheSpec`
            with codebooks; the model's own dtype by default.

    Raises:
        TPUModelError: The model is not a reference transformer.
        ShardingError: The parameters' mesh has an axis that generation cannot use.
        TPUValidationError: The cache format is unknown, or needs codebooks.
    """

    def __init__(
        self,
        model: object,
        params: PyTree,
        *,
        loop: bool | None = None,
        kv: CacheSpec | CacheFormat | str | None = None,
    ) -> None:
        given = jax.tree.map(jnp.asarray, params)
        if any(map(is_stored, jax.tree.leaves(given, is_leaf=is_stored))):
            loop = True  # quantized stacks are not unstacked
        kept = None if kv is None else CacheSpec.of(kv)
        self.programs = DecodingPrograms(transformer_config(model), _mesh_of(given), loop, kept)
        self.params = self.programs.prepared(given)
        self.config = self.programs.config
        self._programs: dict[tuple[Any, ...], Any] = {}
        self._compile_s = 0.0

    def generate(
        self,
        prompts: Prompts,
        *,
        max_new_tokens: int = 128,
        sampling: Sampling | None = None,
        eos: int | Sequence[int] | None = None,
    ) -> Generation:
        """Return all new tokens at once; see `generate`."""
        *_, last = self.stream(
            prompts, max_new_tokens=max_new_tokens, sampling=sampling, eos=eos, every=max_new_tokens
        )
        return last

    def stream(
        self,
        prompts: Prompts,
        *,
        max_new_tokens: int = 128,
        sampling: Sampling | None = None,
        eos: int | Sequence[int] | None = None,
        every: int = 8,
    ) -> Iterator[Generation]:
        """Yield the tokens so far after every few tokens; the last result has all of them.

        Args:
            prompts: One sequence of token ids per row; rows may differ in length.
            max_new_tokens: The most new tokens per row.
            sampling: The sampling settings.
            eos: The token or tokens that end a row.
            every: Tokens between two results.
        """
        tokens, filled, lengths, slots = self._laid_out(prompts, max_new_tokens)
        choose = sampling or Sampling()
        self._compile_s = 0.0
        # The seed and the end tokens are arguments, so that other values need no other program.
        how = dataclasses.replace(choose, seed=0)
        ends = _ends(eos)
        rest = (jnp.asarray(ends or (NO_END,), jnp.int32), jnp.uint32(choose.seed))
        arguments = (self.params, *self.programs.put_rows((tokens, filled)), *rest)
        begin = self._program("prefill", arguments, sampling=how, slots=slots)
        started = time.perf_counter()
        state = jax.block_until_ready(begin(*arguments))
        prompt_s, decode_s = time.perf_counter() - started, 0.0
        while True:
            steps, done = int(state.steps), np.asarray(state.done)
            result = self._result(state, lengths, ends, prompt_s=prompt_s, decode_s=decode_s)
            yield result
            if steps >= max_new_tokens or done.all():
                return
            until = jnp.asarray(min(steps + every, max_new_tokens), jnp.int32)
            extend = self._program("decode", (self.params, state, until, *rest), sampling=how)
            started = time.perf_counter()
            state = jax.block_until_ready(extend(self.params, state, until, *rest))
            decode_s += time.perf_counter() - started

    def follow(self, prompts: Prompts, following: ArrayLike) -> np.ndarray:
        """Return float32 logits (rows, steps, V) before each token that follows a prompt.

        Tokens pass through the cache one by one, so these are the logits that `generate` would
        sample from.

        Args:
            prompts: One sequence of token ids per row; rows may differ in length.
            following: (rows, steps) token ids.

        Raises:
            TPUModelError: The tokens do not fit the model.
        """
        after = np.asarray(following, np.int32)
        tokens, filled, lengths, slots = self._laid_out(prompts, after.shape[1])
        _checked_prompts(after, self.config)
        room = np.zeros((len(tokens), after.shape[1]), np.int32)
        room[: len(lengths)] = after
        arguments = (self.params, *self.programs.put_rows((tokens, filled, room)))
        run = self._program("follow", arguments, slots=slots)
        return np.asarray(run(*arguments), np.float32)[: len(lengths)]

    def _laid_out(
        self, prompts: Prompts, new: int
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
        """Return padded prompts, padded lengths, prompt lengths, and the slots of the cache."""
        rows = _checked_prompts(prompts, self.config)
        lengths = np.asarray([len(row) for row in rows], np.int32)
        slots = self._room(int(lengths.max()), new)
        longest = min(rounded_size(int(lengths.max())), slots)
        # Rows that pad the batch have no prompt, so they are done from the start.
        tokens = np.zeros((self.programs.rows(len(rows)), longest), np.int32)
        filled = np.zeros(len(tokens), np.int32)
        filled[: len(rows)] = lengths
        for row, prompt in enumerate(rows):
            tokens[row, : len(prompt)] = prompt
        return tokens, filled, lengths, slots

    def _program(self, name: str, arguments: tuple[Any, ...], **static: Any) -> Any:
        """Return the compiled program for these shapes, compiled on first use."""
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(arguments[1:]))
        key = (name, shapes, *static.items())
        if key not in self._programs:
            started = time.perf_counter()
            jitted = getattr(self.programs, name)(**static)
            self._programs[key] = jitted.lower(*arguments).compile()
            self._compile_s += time.perf_counter() - started
        return self._programs[key]

    def _room(self, longest: int, max_new_tokens: int) -> int:
        """Return the slots of the cache."""
        if max_new_tokens < 1:
            raise TPUValidationError(f"max_new_tokens={max_new_tokens}; expected at least 1.")
        most = self.config.max_seq_len
        if longest + max_new_tokens > most:
            raise TPUModelError(
                f"a prompt of {longest} tokens and {max_new_tokens} new tokens exceed "
                f"max_seq_len={most} of '{self.config.name}'; shorten the prompt or lower "
                "max_new_tokens."
            )
        return min(rounded_size(longest + max_new_tokens), most)

    def _result(
        self,
        state: DecodingState,
        lengths: np.ndarray,
        ends: tuple[int, ...],
        *,
        prompt_s: float,
        decode_s: float,
    ) -> Generation:
        steps, tokens = int(state.steps), np.asarray(state.tokens)
        new: list[tuple[int, ...]] = []
        ended: list[Ending] = []
        for row, length in zip(tokens[: len(lengths)], lengths, strict=True):
            found: list[int] = row[length : length + steps].tolist()
            stop = next((place for place, one in enumerate(found) if one in ends), None)
            ended.append("length" if stop is None else "end")
            new.append(tuple(found[:stop]))
        return Generation(
            tokens=tuple(new),
            ended=tuple(ended),
            prompt_lengths=tuple(int(length) for length in lengths),
            compile_s=self._compile_s,
            prompt_s=prompt_s,
            decode_s=decode_s,
            decode_steps=steps - 1,
        )


def generate(
    model: object,
    params: PyTree,
    prompts: Prompts,
    *,
    max_new_tokens: int = 128,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    eos: int | Sequence[int] | None = None,
    kv: CacheSpec | CacheFormat | str | None = None,
) -> Generation:
    """Continue prompts with tokens sampled from a reference transformer.

    Args:
        model: A preset's name, a `TransformerConfig`, or a `Workload` of one.
        params: Its parameters.
        prompts: One sequence of token ids per row; rows may differ in length.
        max_new_tokens: The most new tokens per row.
        temperature: 0 takes the likeliest token; 1 samples from the model's distribution.
        top_k: Sample only from this many of the likeliest tokens.
        top_p: Sample only from the likeliest tokens that together have this probability.
        seed: The same seed gives the same tokens.
        eos: The token or tokens that end a row.
        kv: The format of keys and values; see `Generator`.

    Raises:
        TPUModelError: The model is not a reference transformer, or the tokens do not fit it.
        TPUValidationError: A setting is out of range.

    Example:
        >>> work = Workload("tiny", batch_size=1, sequence_length=16)
        >>> params = work.init(jax.random.key(0)).params
        >>> len(generate(work, params, [[1, 2, 3]], max_new_tokens=4).tokens[0])
        4
    """
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    return Generator(model, params, kv=kv).generate(
        prompts, max_new_tokens=max_new_tokens, sampling=sampling, eos=eos
    )


def transformer_config(model: object) -> TransformerConfig:
    """Return the configuration of a preset's name, a configuration or a workload.

    Raises:
        TPUModelError: The model is not a reference transformer.
    """
    given = get_preset(model) if isinstance(model, str) else model
    config = getattr(given, "config", given)  # a workload has one
    if isinstance(config, TransformerConfig):
        return config
    raise TPUModelError(
        "generation needs a reference transformer, but this is "
        f"{type(getattr(given, 'model', given)).__name__}; pass a preset's name, a "
        "TransformerConfig, or a Workload of one."
    )


def _ends(eos: int | Sequence[int] | None) -> tuple[int, ...]:
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(int(one) for one in eos)


def _mesh_of(params: PyTree) -> Mesh | None:
    """Return the mesh of the parameters, or None on one device."""
    for leaf in jax.tree.leaves(params):
        if isinstance(leaf.sharding, NamedSharding) and isinstance(leaf.sharding.mesh, Mesh):
            return leaf.sharding.mesh
    return None


def _checked_prompts(prompts: Prompts, config: TransformerConfig) -> list[Sequence[int]]:
    rows = [np.asarray(prompt) for prompt in prompts]
    if not rows:
        raise TPUValidationError("there are no prompts; pass at least one row of token ids.")
    for number, row in enumerate(rows):
        if row.ndim != 1 or not row.size or not np.issubdtype(row.dtype, np.integer):
            raise TPUValidationError(
                f"prompt {number} has shape {row.shape} and dtype {row.dtype}; expected a row of "
                "at least one token id."
            )
        if row.min() < 0 or row.max() >= config.vocab_size:
            wrong = int(row.min() if row.min() < 0 else row.max())
            raise TPUModelError(
                f"prompt {number} has token {wrong}, but the vocabulary of '{config.name}' is 0 to "
                f"{config.vocab_size - 1}; use the model's own tokenizer."
            )
    return [row.tolist() for row in rows]


def same_choices(
    generator: Generator,
    prompt: Sequence[int],
    tokens: Sequence[int],
    sampling: Sampling,
    *,
    row: int = 0,
) -> np.ndarray:
    """Return for each token whether the generator chooses it after the tokens before it.

    Args:
        generator: The generator that is compared.
        prompt: The tokens of the prompt.
        tokens: The tokens after the prompt.
        sampling: The sampling settings with their seed.
        row: The batch row in which the tokens were sampled.
    """
    logits = generator.follow([prompt], np.asarray([tokens]))[0]
    positions = jnp.arange(len(prompt), len(prompt) + len(tokens))
    keys = random_keys(jnp.uint32(sampling.seed), positions, rows=jnp.full(len(tokens), row))
    return np.asarray(sampling.choose(jnp.asarray(logits), keys)) == np.asarray(tokens)

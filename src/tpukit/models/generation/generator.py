"""`generate`: prompts in, new tokens out, through two compiled programs of fixed shapes."""

import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.typing import ArrayLike

from ...annotations import PyTree
from ...errors import TPUModelError, TPUValidationError
from ..presets import get_preset
from ..stored.parameter import is_stored
from ..transformer.config import TransformerConfig
from .decoding import DecodingState, Sampling
from .programs import DecodingPrograms, rounded_size
from .result import Ending, Generation

NO_END = -1  # a token that no model has
Prompts: TypeAlias = Iterable[ArrayLike | Sequence[int]]  # rows of token numbers


class Generator:
    """Generates from one model; programs are compiled once for each size of prompt and answer.

    Sizes are rounded up to powers of two, so that prompts of similar length share a program.

    Args:
        model: A preset's name, a `TransformerConfig`, or a `Workload` of one.
        params: Its parameters, as `TrainState.params` or `ImportedModel.params` hold them, or
            quantized ones (`QuantizedModel.params`); on a mesh they stay as they are split, and
            caches are split by rows and heads over it.
        loop: Whether layers are a loop; see `DecodingPrograms`. Quantized ones always are.
        kv: Format of keys, values and latents, "bf16" or "fp8"; None: as wide as activations.

    Raises:
        TPUModelError: The model is not the reference transformer.
        TPUValidationError: There is no such format of a cache.
        ShardingError: The parameters' mesh has an axis that generation cannot use.
    """

    def __init__(
        self, model: object, params: PyTree, *, loop: bool | None = None, kv: str | None = None
    ) -> None:
        given = jax.tree.map(jnp.asarray, params)
        if any(map(is_stored, jax.tree.leaves(given, is_leaf=is_stored))):
            loop = True  # stored matrices are not taken apart
        self.programs = DecodingPrograms(transformer_config(model), _mesh_of(given), loop, kv)
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
        """All new tokens at once; see `generate`."""
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
        """What there is so far, every so many tokens; the last is the whole.

        Args:
            prompts: A sequence of token numbers a row; rows may differ in length.
            max_new_tokens: At most, for each row.
            sampling: How a token is chosen.
            eos: The token that ends a row, or several that do.
            every: Tokens between two results.
        """
        rows = _checked_prompts(prompts, self.config)
        lengths = np.asarray([len(row) for row in rows], np.int32)
        slots = self._room(int(lengths.max()), max_new_tokens)
        longest = min(rounded_size(int(lengths.max())), slots)
        # Rows that fill the batch up have no prompt: they are done when they begin.
        tokens = np.zeros((self.programs.rows(len(rows)), longest), np.int32)
        filled = np.zeros(len(tokens), np.int32)
        filled[: len(rows)] = lengths
        for row, prompt in enumerate(rows):
            tokens[row, : len(prompt)] = prompt
        choose = sampling or Sampling()
        self._compile_s = 0.0
        # The seed and the end are arguments: another one needs no other program.
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

    def _program(self, name: str, arguments: tuple[Any, ...], **static: Any) -> Any:
        """The compiled program, made where there is none for these shapes."""
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(arguments[1:]))
        key = (name, shapes, *static.items())
        if key not in self._programs:
            started = time.perf_counter()
            jitted = getattr(self.programs, name)(**static)
            self._programs[key] = jitted.lower(*arguments).compile()
            self._compile_s += time.perf_counter() - started
        return self._programs[key]

    def _room(self, longest: int, max_new_tokens: int) -> int:
        """Slots of the cache."""
        if max_new_tokens < 1:
            raise TPUValidationError(f"max_new_tokens={max_new_tokens}; ask for at least 1.")
        most = self.config.max_seq_len
        if longest + max_new_tokens > most:
            raise TPUModelError(
                f"a prompt of {longest} tokens and {max_new_tokens} new ones are more than the "
                f"{most} that '{self.config.name}' takes; shorten the prompt or ask for fewer."
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
) -> Generation:
    """Continue prompts with tokens drawn from a reference transformer.

    Args:
        model: A preset's name, a `TransformerConfig`, or a `Workload` of one.
        params: Its parameters.
        prompts: A sequence of token numbers a row; rows may differ in length.
        max_new_tokens: At most, for each row.
        temperature: 0 takes the likeliest token; 1 draws from the model's own distribution.
        top_k: Draw only from so many of the likeliest tokens.
        top_p: Draw only from the likeliest tokens that together hold this much probability.
        seed: The same gives the same tokens.
        eos: The token that ends a row, or several that do.

    Raises:
        TPUModelError: It is not a reference transformer, or the tokens do not fit it.
        TPUValidationError: A setting is out of range.

    Example:
        >>> work = Workload("tiny", batch_size=1, sequence_length=16)
        >>> params = work.init(jax.random.key(0)).params
        >>> len(generate(work, params, [[1, 2, 3]], max_new_tokens=4).tokens[0])
        4
    """
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    return Generator(model, params).generate(
        prompts, max_new_tokens=max_new_tokens, sampling=sampling, eos=eos
    )


def transformer_config(model: object) -> TransformerConfig:
    """The reference transformer that `model` names or is.

    Raises:
        TPUModelError: It is none.
    """
    found = get_preset(model) if isinstance(model, str) else model
    config = getattr(found, "config", found)  # a workload has one
    if isinstance(config, TransformerConfig):
        return config
    raise TPUModelError(
        f"tokens can be generated from the reference transformers, and this is "
        f"{type(getattr(found, 'model', found)).__name__}; pass a preset's "
        "name, a TransformerConfig, or a Workload of one."
    )


def _ends(eos: int | Sequence[int] | None) -> tuple[int, ...]:
    if eos is None:
        return ()
    return (eos,) if isinstance(eos, int) else tuple(int(one) for one in eos)


def _mesh_of(params: PyTree) -> Mesh | None:
    """The mesh that the parameters are laid out on, or None where there is none."""
    for leaf in jax.tree.leaves(params):
        if isinstance(leaf.sharding, NamedSharding) and isinstance(leaf.sharding.mesh, Mesh):
            return leaf.sharding.mesh
    return None


def _checked_prompts(prompts: Prompts, config: TransformerConfig) -> list[Sequence[int]]:
    rows = [np.asarray(prompt) for prompt in prompts]
    if not rows:
        raise TPUValidationError("there are no prompts; give at least one row of token numbers.")
    for number, row in enumerate(rows):
        if row.ndim != 1 or not row.size or not np.issubdtype(row.dtype, np.integer):
            raise TPUValidationError(
                f"prompt {number} has shape {row.shape} and dtype {row.dtype}; a prompt is a row "
                "of at least one token number."
            )
        if row.min() < 0 or row.max() >= config.vocab_size:
            wrong = int(row.min() if row.min() < 0 else row.max())
            raise TPUModelError(
                f"prompt {number} holds token {wrong}, and '{config.name}' knows 0 to "
                f"{config.vocab_size - 1}; use the tokenizer the model was trained with."
            )
    return [row.tolist() for row in rows]

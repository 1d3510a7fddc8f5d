"""`generate`: prompts in, new tokens out, through two compiled programs of fixed shapes."""

import dataclasses
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ...annotations import PyTree
from ...errors import TPUModelError, TPUValidationError
from ..presets import get_preset
from ..stored.running import with_stored_parameters
from ..transformer.config import TransformerConfig
from .decoding import DecodingState, Sampling, begin_rows, extend_rows
from .result import Ending, Generation

Prompts: TypeAlias = Iterable[ArrayLike | Sequence[int]]  # rows of token numbers

SMALLEST_ROOM = 32


class Generator:
    """Generates from one model; programs are compiled once for each size of prompt and answer.

    Sizes are rounded up to powers of two, so that prompts of similar length share a program.
    Experts are routed without a capacity here: what a token gets must not depend on its batch.

    Args:
        model: A preset's name, a `TransformerConfig`, or a `Workload` of one.
        params: Its parameters, as `TrainState.params` or `ImportedModel.params` hold them, or
            quantized ones (`QuantizedModel.params`); on a mesh they stay as they are split.

    Raises:
        TPUModelError: The model is not the reference transformer.
    """

    def __init__(self, model: object, params: PyTree) -> None:
        self.config = transformer_config(model).replace(routing="dropless")
        self.params = jax.tree.map(jnp.asarray, params)
        self._programs: dict[tuple[Any, ...], Any] = {}
        self._compile_s = 0.0

    def generate(
        self,
        prompts: Prompts,
        *,
        max_new_tokens: int = 128,
        sampling: Sampling | None = None,
        eos: int | None = None,
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
        eos: int | None = None,
        every: int = 8,
    ) -> Iterator[Generation]:
        """What there is so far, every so many tokens; the last is the whole.

        Args:
            prompts: A sequence of token numbers a row; rows may differ in length.
            max_new_tokens: At most, for each row.
            sampling: How a token is chosen.
            eos: The token that ends a row.
            every: Tokens between two results.
        """
        rows = _checked_prompts(prompts, self.config)
        lengths = np.asarray([len(row) for row in rows], np.int32)
        slots = self._room(int(lengths.max()), max_new_tokens)
        longest = min(_rounded(int(lengths.max())), slots)
        tokens = np.zeros((len(rows), longest), np.int32)
        for row, prompt in enumerate(rows):
            tokens[row, : len(prompt)] = prompt
        choose = sampling or Sampling()
        self._compile_s = 0.0
        # The seed and the end are arguments: another one needs no other program.
        how = dataclasses.replace(choose, seed=0)
        rest = (jnp.asarray(-1 if eos is None else eos, jnp.int32), jnp.uint32(choose.seed))
        arguments = (self.params, jnp.asarray(tokens), jnp.asarray(lengths), *rest)
        begin = self._program(begin_rows, arguments, sampling=how, slots=slots)
        started = time.perf_counter()
        state = jax.block_until_ready(begin(*arguments))
        prompt_s, decode_s = time.perf_counter() - started, 0.0
        while True:
            steps, done = int(state.steps), np.asarray(state.done)
            result = self._result(state, lengths, eos, prompt_s=prompt_s, decode_s=decode_s)
            yield result
            if steps >= max_new_tokens or done.all():
                return
            until = jnp.asarray(min(steps + every, max_new_tokens), jnp.int32)
            extend = self._program(extend_rows, (self.params, state, until, *rest), sampling=how)
            started = time.perf_counter()
            state = jax.block_until_ready(extend(self.params, state, until, *rest))
            decode_s += time.perf_counter() - started

    def _program(self, function: Any, arguments: tuple[Any, ...], **static: Any) -> Any:
        """The compiled program, made where there is none for these shapes."""
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(arguments[1:]))
        key = (function, shapes, *static.items())
        if key not in self._programs:
            started = time.perf_counter()
            whole = with_stored_parameters(partial(function, config=self.config, **static))
            donated = 1 if function is extend_rows else ()
            jitted = jax.jit(whole, donate_argnums=donated)
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
        return min(_rounded(longest + max_new_tokens), most)

    def _result(
        self,
        state: DecodingState,
        lengths: np.ndarray,
        eos: int | None,
        *,
        prompt_s: float,
        decode_s: float,
    ) -> Generation:
        steps, tokens = int(state.steps), np.asarray(state.tokens)
        new: list[tuple[int, ...]] = []
        ended: list[Ending] = []
        for row, length in zip(tokens, lengths, strict=True):
            found: list[int] = row[length : length + steps].tolist()
            ended.append("end" if eos in found else "length")
            new.append(tuple(found[: found.index(eos)] if eos in found else found))
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
    eos: int | None = None,
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
        eos: The token that ends a row.

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


def _rounded(size: int) -> int:
    return max(SMALLEST_ROOM, 1 << (size - 1).bit_length())


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

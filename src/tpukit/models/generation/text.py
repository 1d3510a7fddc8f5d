"""Streamed text: complete characters only, and no beginning of a possible stop word."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ...errors import TPUValidationError
from .decoding import Sampling
from .generator import Generation, Generator

UNFINISHED = "�"  # a tokenizer's text for a character whose bytes are incomplete


class Decoder(Protocol):
    """The decoding half of a tokenizer."""

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids."""
        ...


@dataclass(frozen=True, kw_only=True)
class TextPart:
    """New text and all text so far.

    Attributes:
        new: Text that can be shown now; the `new` texts of all parts form the final `text`.
        text: All text so far, without the stop word that ended it.
        generation: The tokens of the text, and times.
        stop: The stop word that ended the text, or None.
    """

    new: str
    text: str
    generation: Generation
    stop: str | None = None


def stream_text(
    generator: Generator,
    tokenizer: Decoder,
    prompt: Sequence[int],
    *,
    stop: Sequence[str] = (),
    max_new_tokens: int = 128,
    sampling: Sampling | None = None,
    eos: int | Sequence[int] | None = None,
    every: int = 8,
) -> Iterator[TextPart]:
    """Continue one prompt and yield its text in parts.

    Shown text never has to be taken back, because incomplete characters and possible beginnings of
    stop words are held back until they are certain. The end of the text does not depend on
    `every`.

    Args:
        generator: The model.
        tokenizer: The model's tokenizer.
        prompt: Token ids.
        stop: Words that end the text; the first complete one is removed.
        max_new_tokens: The most new tokens.
        sampling: The sampling settings.
        eos: The token or tokens that end a text.
        every: Tokens between two parts.

    Raises:
        TPUValidationError: A stop word is empty.
    """
    if not all(stop):
        raise TPUValidationError("a stop word is empty, which would end every text; leave it out.")
    shown, last = "", None
    for last in generator.stream(
        [prompt], max_new_tokens=max_new_tokens, sampling=sampling, eos=eos, every=every
    ):
        ended = _stopped(last, tokenizer, stop)
        if ended is not None:
            yield replace(ended, new=ended.text[len(shown) :])
            return
        text = _certain(tokenizer.decode(last.tokens[0]), stop)
        if len(text) > len(shown):
            yield TextPart(new=text[len(shown) :], text=text, generation=last)
            shown = text
    if last is not None:
        text = tokenizer.decode(last.tokens[0])
        yield TextPart(new=text[len(shown) :], text=text, generation=last)


def _stopped(found: Generation, tokenizer: Decoder, stop: Sequence[str]) -> TextPart | None:
    """Return the text up to the first complete stop word, or None without one."""
    tokens = found.tokens[0]
    whole = tokenizer.decode(tokens)
    if not any(word in whole for word in stop):
        return None
    for count in range(1, len(tokens) + 1):
        text = tokenizer.decode(tokens[:count])
        places = {text.index(word): word for word in stop if word in text}
        if places:
            first = min(places)
            kept = replace(found, tokens=(tokens[:count],), ended=("stop",))
            return TextPart(new="", text=text[:first], generation=kept, stop=places[first])
    return None


def _certain(text: str, stop: Sequence[str]) -> str:
    """Return the text without an end that may change or become a stop word."""
    text = text.rstrip(UNFINISHED)
    held = 0
    for word in stop:
        longest = min(len(word) - 1, len(text))
        held = max(held, next((n for n in range(longest, 0, -1) if text.endswith(word[:n])), 0))
    return text[: len(text) - held]

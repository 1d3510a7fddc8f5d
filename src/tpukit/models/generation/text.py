"""Text as it grows: whole characters only, nothing that may turn out to be a stop word."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from ...errors import TPUValidationError
from .decoding import Sampling
from .generator import Generator
from .result import Generation

UNFINISHED = "�"  # what a tokenizer makes of a character whose bytes have not all come


class Decoder(Protocol):
    """The half of a tokenizer that is needed here."""

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token numbers."""
        ...


@dataclass(frozen=True, kw_only=True)
class TextPart:
    """What is new, and all there is so far.

    Attributes:
        new: Text that can be shown now; parts put together are `text` of the last.
        text: All of it so far, without the stop word that ended it.
        generation: The tokens behind it, and times.
        stop: The stop word that ended it, or None.
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
    """Continue one prompt and give its text piece by piece.

    The end of what was shown never has to be taken back: half a character and the beginning of a
    stop word wait until it is clear what they are. Where a text stops does not depend on `every`.

    Args:
        generator: The model.
        tokenizer: Makes text of its tokens.
        prompt: Token numbers.
        stop: Words that end the text; the first to be complete does, and is left out.
        max_new_tokens: At most.
        sampling: How a token is chosen.
        eos: The token that ends a text, or several that do.
        every: Tokens between two parts.

    Raises:
        TPUValidationError: A stop word is empty.
    """
    if not all(stop):
        raise TPUValidationError("a stop word is empty and would end every text; leave it out.")
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
    """The text up to the first stop word to be complete; None where there is none."""
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
    """The text without an end that may still change, or become a stop word."""
    text = text.rstrip(UNFINISHED)
    held = 0
    for word in stop:
        longest = min(len(word) - 1, len(text))
        held = max(held, next((n for n in range(longest, 0, -1) if text.endswith(word[:n])), 0))
    return text[: len(text) - held]

"""Text grows by whole characters, and no part of a stop word is ever shown."""

from types import SimpleNamespace

import pytest

from tpukit.errors import TPUValidationError
from tpukit.models.generation import Generation, stream_text
from tpukit.training.data.tokenizer import ByteTokenizer


def speaker(text):
    """A generator that says `text` byte by byte, whatever it is asked."""
    tokens = tuple(text.encode())

    def stream(prompts, *, max_new_tokens, every, **_):
        for count in [*range(1, len(tokens), every), len(tokens)]:
            yield Generation(
                tokens=(tokens[:count],), ended=("length",), prompt_lengths=(1,),
                compile_s=0.0, prompt_s=0.0, decode_s=0.0, decode_steps=count - 1,
            )  # fmt: skip

    return SimpleNamespace(stream=stream)


def said(text, stop=(), every=1):
    return list(stream_text(speaker(text), ByteTokenizer(), [0], stop=stop, every=every))


@pytest.mark.parametrize("every", [1, 2, 3, 100])
@pytest.mark.parametrize(
    ("text", "stop", "expected", "word"),
    [
        ("ab\nUser: c", ["\nUser:"], "ab", "\nUser:"),
        ("ab\nUse c", ["\nUser:"], "ab\nUse c", None),  # only the beginning of one
        ("aaab", ["aab"], "a", "aab"),
        ("one STOP two END", ["END", "STOP"], "one ", "STOP"),
        ("xyzw", ["yz", "xyzw"], "x", "yz"),  # the first to be complete
        ("Größe 東京 🙂!", ["!"], "Größe 東京 🙂", "!"),
        ("Größe 東京 🙂", (), "Größe 東京 🙂", None),
        ("STOP", ["STOP"], "", "STOP"),
    ],
)
def test_a_stop_word_ends_the_text_and_is_never_shown(text, stop, expected, word, every):
    parts = said(text, stop, every)
    assert "".join(part.new for part in parts) == parts[-1].text == expected
    assert parts[-1].stop == word
    assert parts[-1].generation.ended == (("stop",) if word else ("length",))
    for part in parts:
        assert expected.startswith(part.text)


def test_tokens_end_with_the_stop_word_however_often_one_looks():
    ends = {said("abc|def", ["|"], every)[-1].generation.tokens for every in (1, 2, 7)}
    assert ends == {(tuple(b"abc|"),)}


def test_text_that_cannot_be_a_stop_word_is_not_held_back():
    assert [part.new for part in said("ab|c", ["|||"])] == ["a", "b", "|c", ""]


def test_an_empty_stop_word_is_refused():
    with pytest.raises(TPUValidationError, match="stop word is empty"):
        said("abc", ["x", ""])

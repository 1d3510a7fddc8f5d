"""Tokenizers: bytes there and back, files of Hugging Face, and errors that say where to get one."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from tpukit.errors import ConfigError
from tpukit.training.data import ByteTokenizer, load_tokenizer
from tpukit.training.data.tokenizer import tokenizer_key


@pytest.fixture
def word_file(tmp_path):
    """A tokenizer.json of four words."""
    words = {"hello": 0, "world": 1, "[UNK]": 2, "<eos>": 3, "big": 70000}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_bytes_come_back_as_the_text(text):
    tokenizer = ByteTokenizer()
    tokens = tokenizer.encode_batch([text])[0]
    assert tokens.astype(np.uint8).tobytes() == text.encode()
    assert tokenizer.decode([*tokens.tolist(), tokenizer.end_of_document]) == text


def test_a_file_or_its_folder_is_a_tokenizer(word_file):
    for where in (word_file, str(word_file), word_file.parent):
        tokenizer = load_tokenizer(where)
        assert [found.tolist() for found in tokenizer.encode_batch(["hello world", "what"])] == [
            [0, 1],
            [2],
        ]
        assert tokenizer.vocab_size == 70001  # by the largest number, not by counting words
        assert tokenizer.end_of_document == 3
        assert tokenizer.decode([0, 1]) == "hello world"


def test_the_end_of_a_document_can_be_said(word_file):
    assert load_tokenizer(word_file, end="world").end_of_document == 1
    with pytest.raises(ConfigError, match=r"has no token 'wurld'\. Did you mean 'world'"):
        load_tokenizer(word_file, end="wurld")
    settings = word_file.with_name("tokenizer_config.json")
    settings.write_text(json.dumps({"eos_token": {"content": "hello"}}))
    assert load_tokenizer(word_file).end_of_document == 0


@pytest.mark.parametrize("name", ["gpt2", "meta-llama/Llama-3.1-8B"])
def test_a_name_says_how_to_get_the_file(name):
    with pytest.raises(ConfigError, match=r"none is downloaded.*hf download"):
        load_tokenizer(name)


def test_what_is_no_tokenizer_is_refused(tmp_path, word_file):
    with pytest.raises(ConfigError, match=r"Did you mean 'tokenizer\.json'"):
        load_tokenizer(tmp_path / "tokeniser.json")
    (tmp_path / "a.model").write_bytes(b"\n\x0e\xff\x00")
    with pytest.raises(ConfigError, match=r"SentencePiece \.model must be converted"):
        load_tokenizer(tmp_path / "a.model")
    (tmp_path / "b.json").write_text('{"a": 1}')
    with pytest.raises(ConfigError, match=r"is no tokenizer\.json"):
        load_tokenizer(tmp_path / "b.json")


def test_tokenizers_are_told_apart_by_what_they_make(word_file):
    keys = {tokenizer_key(load_tokenizer(name)) for name in ("bytes", word_file)}
    keys.add(tokenizer_key(load_tokenizer(word_file, end="world")))
    assert len(keys) == 3

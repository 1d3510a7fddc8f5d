"""Tokenizers: bytes there and back, files of Hugging Face, and errors that say where to get one."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from tpukit.errors import ConfigError
from tpukit.training.data import ByteTokenizer, load_tokenizer
from tpukit.training.data.prepare import prepare_tokens
from tpukit.training.data.tokenizer import keep_tokenizer, tokenizer_key, tokenizer_of


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


@pytest.fixture(scope="module")
def bytes_as_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    assert keep_tokenizer("bytes", folder)
    return load_tokenizer(folder)


@given(text=st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_bytes_as_a_file_make_the_same_tokens(bytes_as_file, text):
    own = ByteTokenizer()
    tokens = own.encode_batch([text])[0].tolist()
    assert bytes_as_file.encode_batch([text])[0].tolist() == tokens
    assert bytes_as_file.decode(tokens) == text
    assert (bytes_as_file.vocab_size, bytes_as_file.end_of_document) == (257, 256)


def test_prepared_data_keep_their_tokenizer(word_file, tmp_path):
    (tmp_path / "text.txt").write_text("hello world")
    word_file.with_name("chat_template.jinja").write_text("{{ messages }}")
    prepare_tokens(tmp_path / "text.txt", tmp_path / "words", tokenizer=word_file)
    kept = tokenizer_of(tmp_path / "words")
    assert kept == str(tmp_path / "words" / "tokenizer.json")
    assert load_tokenizer(kept).encode_batch(["world"])[0].tolist() == [1]
    assert (tmp_path / "words" / "chat_template.jinja").is_file()
    prepare_tokens(tmp_path / "text.txt", tmp_path / "bytes", tokenizer="bytes")
    assert tokenizer_of(tmp_path / "bytes") == "bytes"
    assert tokenizer_of(tmp_path) is tokenizer_of(np.zeros(3)) is None


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
    with pytest.raises(ConfigError, match=r"tpukit downloads none.*hf download"):
        load_tokenizer(name)


def test_what_is_no_tokenizer_is_refused(tmp_path, word_file):
    with pytest.raises(ConfigError, match=r"Did you mean 'tokenizer\.json'"):
        load_tokenizer(tmp_path / "tokeniser.json")
    (tmp_path / "a.model").write_bytes(b"\n\x0e\xff\x00")
    with pytest.raises(ConfigError, match=r"convert a SentencePiece \.model"):
        load_tokenizer(tmp_path / "a.model")
    (tmp_path / "b.json").write_text('{"a": 1}')
    with pytest.raises(ConfigError, match=r"is not a tokenizer\.json"):
        load_tokenizer(tmp_path / "b.json")


def test_tokenizers_are_told_apart_by_what_they_make(word_file):
    keys = {tokenizer_key(load_tokenizer(name)) for name in ("bytes", word_file)}
    keys.add(tokenizer_key(load_tokenizer(word_file, end="world")))
    assert len(keys) == 3

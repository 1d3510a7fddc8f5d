"""An inspection counts what numpy counts, and notices what changed on disk."""

import io
import json

import numpy as np
import pytest
from rich.console import Console

from tpukit.errors import TPUValidationError
from tpukit.training.data import inspect_data, prepare_tokens
from tpukit.training.data.inspection import render_inspection


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "a.jsonl"
    texts = ["a", "bb", "<b>" * 10, "d" * 100]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare_tokens(path, tmp_path / "out", tokenizer="bytes", shard_tokens=50)
    return tmp_path / "out"


def test_figures_are_those_of_the_tokens(tmp_path):
    tokens = np.random.default_rng(0).zipf(1.5, 100_000) % 1000
    np.save(tmp_path / "t.npy", tokens.astype(np.uint16))
    found = inspect_data(tmp_path / "t.npy", top=3)
    values, counts = np.unique(tokens, return_counts=True)
    assert (found.smallest_token, found.largest_token) == (values[0], values[-1])
    assert found.distinct_tokens == len(values)
    assert found.most_frequent[0].token == values[counts.argmax()]
    assert found.most_frequent[0].count == counts.max()
    shares = counts / len(tokens)
    assert found.unigram_entropy_nats == pytest.approx(-(shares * np.log(shares)).sum())
    assert found.num_documents is None
    assert found.document_lengths == ()


def test_documents_are_counted_by_length(folder):
    found = inspect_data(folder)
    assert (found.num_tokens, found.num_documents, found.shards) == (137, 4, 3)
    bins = {(entry.shortest, entry.longest): entry.documents for entry in found.document_lengths}
    assert bins == {(2, 3): 2, (4, 7): 0, (8, 15): 0, (16, 31): 1, (32, 63): 0, (64, 127): 1}
    assert found.length_percentiles == {10: 2, 50: 3, 90: 101, 100: 101}
    assert found.most_frequent[0].text == "d"
    assert "end of document" in {entry.text for entry in found.most_frequent}


def test_people_and_browsers_see_the_same(folder):
    found = inspect_data(folder)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(found)
    text, page = console.export_text(), render_inspection(found)
    for shown in ("137", "64–127", "end of document"):
        assert shown in text
        assert shown in page
    assert "'&lt;'" in page.replace("&#x27;", "'")  # tokens cannot break out of the page
    assert json.loads(json.dumps(found.to_dict()))["origin"] == "measured"


def test_a_changed_shard_is_noticed(folder):
    shard = folder / "tokens-00001.npy"
    content = bytearray(shard.read_bytes())
    content[-2] ^= 1
    shard.write_bytes(bytes(content))
    with pytest.raises(TPUValidationError, match=r"tokens-00001\.npy is corrupt.*checksum"):
        inspect_data(folder)


def test_numbers_no_vocabulary_has_are_refused(tmp_path):
    for token in (-3, 2**30):
        np.save(tmp_path / "t.npy", np.array([1, token]))
        with pytest.raises(TPUValidationError, match=f"contains the token {token}; expected"):
            inspect_data(tmp_path / "t.npy")
    np.save(tmp_path / "t.npy", np.array([], np.int32))
    with pytest.raises(TPUValidationError, match="nothing to inspect"):
        inspect_data(tmp_path / "t.npy")


@pytest.mark.parametrize("header", [b"(2000,)00,)00", b"(((", b"\0", b"'", b"1.2.3"])
def test_a_damaged_header_is_one_sentence(tmp_path, header):
    np.save(tmp_path / "t.npy", np.arange(64, dtype=np.uint16))
    whole = (tmp_path / "t.npy").read_bytes()
    (tmp_path / "t.npy").write_bytes(whole.replace(b"(64,)", header.ljust(5)))
    with pytest.raises(TPUValidationError, match=r"is not an \.npy file"):
        inspect_data(tmp_path / "t.npy")

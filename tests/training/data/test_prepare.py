"""Text to tokens: every source gives the same tokens, whole or not at all."""

import errno
import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpukit.errors import ConfigError, TPUValidationError
from tpukit.training.data import open_data, open_tokens, prepare_tokens
from tpukit.training.data.documents import read_example
from tpukit.training.data.token_folder import TokenWriter
from tpukit.training.data.tokenizer import keep_tokenizer

TEXTS = ["hello", "wörld 🙂", "", "the end\nof it"]
EXPECTED = np.concatenate([[*text.encode(), 256] for text in TEXTS])
BOUNDS = np.cumsum([0, *(len(text.encode()) + 1 for text in TEXTS)])


def written_json_lines(folder):
    path = folder / "a.jsonl"
    path.write_text("\n\n".join(json.dumps({"text": text, "id": 1}) for text in TEXTS) + "\n")
    return path


def written_gzip(folder):
    path = folder / "a.jsonl.gz"
    path.write_bytes(gzip.compress(written_json_lines(folder).read_bytes()))
    return path


def written_text_files(folder):
    (folder / "texts").mkdir()
    for number, text in enumerate(TEXTS):
        (folder / "texts" / f"{number}.txt").write_bytes(text.encode())
    return folder / "texts"


def written_array_record(folder, records=None):
    from array_record.python.array_record_module import ArrayRecordWriter

    path = folder / "a.array_record"
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for record in records or [json.dumps({"text": text}).encode() for text in TEXTS]:
        writer.write(record)
    writer.close()
    return path


def written_huggingface(folder):
    import datasets

    datasets.Dataset.from_dict({"text": TEXTS, "id": [1] * 4}).save_to_disk(
        str(folder / "hf"), num_proc=None
    )
    return folder / "hf"


SOURCES = [
    written_json_lines,
    written_gzip,
    written_text_files,
    written_array_record,
    written_huggingface,
]


@pytest.mark.parametrize("write", SOURCES, ids=lambda write: write.__name__.split("_", 1)[1])
def test_every_source_gives_the_same_tokens(tmp_path, write):
    found = prepare_tokens(write(tmp_path), tmp_path / "out", tokenizer="bytes", shard_tokens=10)
    assert (found.num_tokens, found.num_documents, found.shards) == (len(EXPECTED), 4, 4)
    store = open_tokens(tmp_path / "out")
    assert np.array_equal(store.read([0], [len(EXPECTED)])[0], EXPECTED)
    assert np.array_equal(store.documents, BOUNDS)
    assert store.dtype == np.uint16
    # The shards are ordinary .npy files.
    assert np.array_equal(np.load(tmp_path / "out" / "tokens-00001.npy"), EXPECTED[10:20])


def test_text_opens_directly_and_is_tokenized_once(tmp_path, monkeypatch):
    monkeypatch.setenv("TPUKIT_CACHE_DIR", str(tmp_path / "cache"))
    path = written_json_lines(tmp_path)
    first = open_tokens(path, tokenizer="bytes")
    made = list((tmp_path / "cache" / "tokens").rglob("*"))
    times = [entry.stat().st_mtime_ns for entry in made]
    again = open_tokens(path, tokenizer="bytes")
    assert again.fingerprint == first.fingerprint
    assert [entry.stat().st_mtime_ns for entry in made] == times
    path.write_text(json.dumps("another text, longer"))
    assert open_tokens(path, tokenizer="bytes").fingerprint != first.fingerprint


def test_known_tokens_are_checked_before_the_first_batch(tmp_path):
    prepare_tokens(written_json_lines(tmp_path), tmp_path / "out", tokenizer="bytes")
    with pytest.raises(TPUValidationError, match=r"contains the token 256.*made with .* 'bytes'"):
        open_data(
            tmp_path / "out",
            sequence_length=4,
            batch_size=1,
            vocab_size=256,
            process_index=0,
            process_count=1,
        )


def test_token_numbers_need_no_tokenizer(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"ids": [1, 2, 70000]}\n{"ids": [3]}\n')
    prepare_tokens(tmp_path / "a.jsonl", tmp_path / "out", tokenizer=None, text_key="ids")
    store = open_tokens(tmp_path / "out")
    assert store.read([0], [4])[0].tolist() == [1, 2, 70000, 3]
    assert store.documents.tolist() == [0, 3, 4]
    with pytest.raises(ConfigError, match="are text, which needs a tokenizer"):
        prepare_tokens(written_json_lines(tmp_path), tmp_path / "b", tokenizer=None)


def test_long_texts_are_cut_between_lines_and_stay_one_document(tmp_path):
    text = "".join(f"line {number}\n" for number in range(200_000))
    (tmp_path / "a.txt").write_text(text)
    prepare_tokens(tmp_path / "a.txt", tmp_path / "out", tokenizer="bytes")
    store = open_tokens(tmp_path / "out")
    assert store.documents.tolist() == [0, len(text) + 1]
    assert store.read([0], [len(text)])[0].astype(np.uint8).tobytes() == text.encode()


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b'{"text": "a"}\n{"text": ', "line 2 is not JSON"),
        (
            b'{"text": "a"}\n\n{"txt": "b"}',
            r"line 3 has no field 'text', only txt.*Did you mean 'txt'",
        ),
        (b'{"text": 5}', "field 'text' is a int"),
        (b"[1, 2]", "line 1 is a list"),
        (b'{"text": "\xff"}', "line 1 is not UTF-8"),
        (b"\n", "no text, so there are no tokens"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_left(tmp_path, content, why):
    (tmp_path / "a.jsonl").write_bytes(content)
    with pytest.raises(TPUValidationError, match=why):
        prepare_tokens(tmp_path / "a.jsonl", tmp_path / "out", tokenizer="bytes")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.jsonl"]


def test_damaged_files_are_named(tmp_path):
    path = written_gzip(tmp_path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(TPUValidationError, match="is corrupt"):
        prepare_tokens(path, tmp_path / "out", tokenizer="bytes")
    path = written_array_record(tmp_path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(TPUValidationError, match="corrupt, or not an ArrayRecord"):
        prepare_tokens(path, tmp_path / "out", tokenizer="bytes")


def test_two_that_make_the_same_at_once_both_have_it(tmp_path):
    source, out = written_json_lines(tmp_path), tmp_path / "out"

    def other_is_faster(_):
        prepare_tokens(source, out, tokenizer="bytes")

    how = {"tokenizer": "bytes", "exist_ok": True}
    found = prepare_tokens(source, out, progress=other_is_faster, **how)
    assert found == prepare_tokens(source, out, **how)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["a.jsonl", "out"]


def test_what_is_there_is_not_overwritten(tmp_path):
    source, out = written_json_lines(tmp_path), tmp_path / "out"
    prepare_tokens(source, out, tokenizer="bytes")
    with pytest.raises(TPUValidationError, match="contains prepared data already; use --force"):
        prepare_tokens(source, out, tokenizer="bytes")
    (tmp_path / "b.txt").write_text("other")
    prepare_tokens(tmp_path / "b.txt", out, tokenizer="bytes", force=True)
    assert open_tokens(out).num_tokens == 6
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.tex").write_text("years of work")
    with pytest.raises(TPUValidationError, match="is not replaced"):
        prepare_tokens(source, mine, tokenizer="bytes", force=True)
    assert (mine / "thesis.tex").exists()


def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    source = written_json_lines(tmp_path)
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TPUValidationError, match=r"No space left on device.*no part of it"):
        prepare_tokens(source, tmp_path / "out", tokenizer="bytes")
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.jsonl"]


def test_tokens_are_not_made_in_a_bucket(tmp_path):
    with pytest.raises(ConfigError, match="gcloud storage cp -r"):
        prepare_tokens(written_json_lines(tmp_path), Path("gs://bucket/out"), tokenizer="bytes")


def test_a_split_of_a_huggingface_data_set_is_named(tmp_path):
    import datasets

    part = datasets.Dataset.from_dict({"input_ids": [[1, 2], [3]]})
    datasets.DatasetDict({"train": part, "test": part}).save_to_disk(str(tmp_path / "hf"))
    with pytest.raises(TPUValidationError, match=r"the splits train, test .* one: .*/hf/train"):
        prepare_tokens(tmp_path / "hf", tmp_path / "out", tokenizer=None)
    prepare_tokens(tmp_path / "hf" / "train", tmp_path / "out", tokenizer=None)
    assert open_tokens(tmp_path / "out").documents.tolist() == [0, 2, 3]
    next((tmp_path / "hf" / "test").glob("*.arrow")).write_bytes(b"damaged")
    with pytest.raises(TPUValidationError, match="cannot be opened as a Hugging Face data set"):
        prepare_tokens(tmp_path / "hf" / "test", tmp_path / "out2", tokenizer=None)


def test_of_two_writers_the_first_wins(tmp_path):
    out = tmp_path / "out"
    with TokenWriter(out, vocab_size=9, tokenizer={}) as first:
        first.add([1, 2])
        with TokenWriter(out, vocab_size=9, tokenizer={}) as second:
            second.add([3])
            second.finish()
        with pytest.raises(TPUValidationError, match="already"):
            first.finish()
    assert open_tokens(out).num_tokens == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]


KILLED = """
import sys, time
from pathlib import Path
from tpukit.training.data.token_folder import TokenWriter
from tpukit.training.data.tokenizer import keep_tokenizer
writer = TokenWriter(Path(sys.argv[1]), vocab_size=9, tokenizer={}, shard_tokens=2)
writer.add([1, 2, 3])
print("half", flush=True)
time.sleep(600)
"""


def test_what_a_killed_writer_left_is_removed_by_the_next(tmp_path):
    out = tmp_path / "out"
    child = subprocess.Popen([sys.executable, "-c", KILLED, out], stdout=subprocess.PIPE)
    with child:
        assert child.stdout.readline() == b"half\n"
        child.kill()
    assert not out.exists()
    assert len(list(tmp_path.glob(".out.partial-*"))) == 1
    with TokenWriter(out, vocab_size=9, tokenizer={}) as again:
        assert len(list(tmp_path.glob(".out.partial-*"))) == 1  # its own
        again.add([4])
        again.finish()
    assert [entry.name for entry in tmp_path.iterdir()] == ["out"]
    assert open_tokens(out).read([0], [1])[0].tolist() == [4]


def test_a_damaged_folder_is_refused(tmp_path):
    out = tmp_path / "out"
    prepare_tokens(written_json_lines(tmp_path), out, tokenizer="bytes", shard_tokens=10)
    shard = out / "tokens-00002.npy"
    content = shard.read_bytes()
    np.save(shard, np.arange(3, dtype=np.uint16))
    with pytest.raises(TPUValidationError, match="corrupt: it has 3 uint16 tokens, but its man"):
        open_tokens(out)
    shard.unlink()
    with pytest.raises(TPUValidationError, match="missing, one of 4 shards"):
        open_tokens(out)
    shard.write_bytes(content)
    manifest = json.loads((out / "tokens.json").read_text())
    (out / "tokens.json").write_text(json.dumps({**manifest, "version": 9}))
    with pytest.raises(TPUValidationError, match="has version 9"):
        open_tokens(out)
    (out / "tokens.json").write_text("{}")
    with pytest.raises(TPUValidationError, match="is not a manifest of 'tpukit data prepare'"):
        open_tokens(out)


def varint(value):
    value &= (1 << 64) - 1
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def field(number, content):
    return varint(number << 3 | 2) + varint(len(content)) + content


def example(features):
    entries = b""
    for name, values in features.items():
        if isinstance(values, bytes):
            kind = field(1, field(1, values))
        else:
            kind = field(3, field(1, b"".join(varint(value) for value in values)))
        entries += field(1, field(1, name.encode()) + field(2, kind))
    return field(1, entries)


@given(
    text=st.binary(max_size=300),
    numbers=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=200),
)
def test_examples_of_tensorflow_are_read(text, numbers):
    found = read_example(example({"text": text, "ids": numbers}))
    assert found == {"text": [text], "ids": numbers}


@given(record=st.binary(max_size=80))
def test_other_records_are_no_examples_and_no_crash(record):
    found = read_example(record)
    assert found is None or all(isinstance(name, str) for name in found)


def test_array_records_of_every_form(tmp_path):
    records = [b"plain text", example({"text": "hö".encode()}), b'{"text": "json"}']
    path = written_array_record(tmp_path, records)
    prepare_tokens(path, tmp_path / "out", tokenizer="bytes")
    store = open_tokens(tmp_path / "out")
    joined = store.read([0], [store.num_tokens])[0]
    assert bytes(token for token in joined.tolist() if token < 256) == "plain texthöjson".encode()


def test_half_of_a_surrogate_pair_is_replaced(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a\\ud83d b"}\n{"text": "\\ud83d\\ude00"}\n')
    keep_tokenizer("bytes", tmp_path)  # the same tokens by the tokenizers library
    expected = [*"a� b".encode(), 256, *"😀".encode(), 256]
    for tokenizer in ("bytes", tmp_path / "tokenizer.json"):
        prepare_tokens(tmp_path / "a.jsonl", tmp_path / "out", tokenizer=tokenizer, force=True)
        (shard,) = open_tokens(tmp_path / "out").shards
        assert list(shard.read([(0, len(expected))])[0]) == expected

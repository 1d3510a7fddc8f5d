"""Data in a bucket, from a server on the loopback that speaks Cloud Storage's JSON API."""

import socket

import numpy as np
import pytest

from tpukit.errors import ConfigError, TPUValidationError
from tpukit.runtime import object_store
from tpukit.training.data import open_data, open_tokens, prepare_tokens

TOKENS = np.random.default_rng(0).integers(0, 500, 5000).astype(np.uint16)


@pytest.fixture
def both(bucket, tmp_path):
    """The same two shards here and in the bucket."""
    folder = tmp_path / "here"
    folder.mkdir()
    for number, part in enumerate(np.split(TOKENS, [1234])):
        np.save(folder / f"part-{number}.npy", part)
        bucket.objects[f"data/part-{number}.npy"] = (folder / f"part-{number}.npy").read_bytes()
    return bucket, folder


def opened(source, **changes):
    return open_data(
        source, sequence_length=64, batch_size=8, process_index=0, process_count=1, **changes
    )


def test_batches_are_those_of_a_local_copy(both):
    _, folder = both
    here, there = (
        opened(source, num_epochs=1).stream() for source in (folder, "gs://bucket/data/")
    )
    for _ in range(3):
        expected, found = next(here), next(there)
        assert np.array_equal(found["inputs"], expected["inputs"])
        assert np.array_equal(found["targets"], expected["targets"])
    # And so a run can move from one to the other.
    state = here.state()
    there.restore(state)
    assert np.array_equal(next(there)["inputs"], next(here)["inputs"])
    here.close()
    there.close()


def test_only_the_ranges_needed_are_read(both):
    bucket, _ = both
    bucket.objects["one.npy"] = bucket.objects["data/part-0.npy"]
    store = open_tokens("gs://bucket/one.npy")
    store.read([10, 500], [20, 510])
    ranges = [request for request in bucket.requests if "/download" in request and "one" in request]
    assert sorted(request.split("bytes=")[1] for request in ranges) == [
        "0-2595",  # the header: at most 4096 bytes
        "1128-1147",
        "148-167",
    ]


def test_text_is_fetched_once(bucket, tmp_path):
    bucket.objects["text/a.jsonl"] = b'{"text": "hello"}\n{"text": "world"}\n'
    for _ in range(2):
        store = open_tokens("gs://bucket/text", tokenizer="bytes")
        assert bytes(store.read([0], [5])[0].astype(np.uint8)) == b"hello"
    assert sum(request.startswith("/download") for request in bucket.requests) == 1
    left = {path.parts[-2] for path in (tmp_path / "cache").glob("*/*")}
    assert left == {"tokens"}  # what was fetched is gone


def test_prepared_data_can_lie_in_a_bucket(bucket, tmp_path):
    (tmp_path / "a.txt").write_text("hello world")
    prepare_tokens(tmp_path / "a.txt", tmp_path / "out", tokenizer="bytes")
    for file in (tmp_path / "out").iterdir():
        bucket.objects[f"out/{file.name}"] = file.read_bytes()
    store = open_tokens("gs://bucket/out")
    assert store.largest_token == 256
    assert store.documents.tolist() == [0, 12]


@pytest.mark.parametrize("code", [401, 403])
def test_missing_credentials_say_how_to_get_some(bucket, code):
    bucket.objects["data/tokens.npy"] = b"x"
    bucket.refuse = code
    with pytest.raises(ConfigError, match="gcloud auth application-default login"):
        open_tokens("gs://bucket/data")


def test_what_is_not_there_is_named(bucket):
    with pytest.raises(TPUValidationError, match="nothing at gs://bucket/nope"):
        open_tokens("gs://bucket/nope")


def test_a_file_that_changes_while_it_is_read_is_noticed(both):
    bucket, _ = both
    store = open_tokens("gs://bucket/data/part-0.npy")
    bucket.objects["data/part-0.npy"] = bucket.objects["data/part-0.npy"][:1000]
    with pytest.raises(TPUValidationError, match="changed while it was read"):
        store.read([400], [600])


def test_without_a_network_nobody_waits(monkeypatch):
    def not_found(*_):
        raise socket.gaierror(-2, "Name or service not known")

    object_store.open_files.cache_clear()
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.setattr(object_store.socket, "getaddrinfo", not_found)
    with pytest.raises(TPUValidationError, match=r"is not found .*use a path on this machine"):
        open_tokens("gs://bucket/tokens.npy")

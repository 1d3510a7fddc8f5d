"""Batches of stored tokens: each token once an epoch, one order for all, resumed to the bit."""

import dataclasses
import json
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpukit.errors import ConfigError, TPUValidationError
from tpukit.training.data import open_data
from tpukit.training.data.indexed import PREFETCH
from tpukit.training.data.token_store import ArrayShard, TokenStore

TOKENS = np.arange(1, 1002, dtype=np.uint16)  # 100 examples of 10, each known by its first token


def opened(source=TOKENS, **changes):
    settings = {"sequence_length": 10, "batch_size": 8, "process_index": 0, "process_count": 1}
    return open_data(source, **settings | changes)


def drawn(stream, count):
    batches = [next(stream) for _ in range(count)]
    stream.close()
    return batches


def rows(batches):
    return np.concatenate([batch["inputs"] for batch in batches])


def test_targets_are_the_next_tokens():
    batch = drawn(opened(shuffle=False).stream(), 1)[0]
    assert np.array_equal(batch["inputs"], np.arange(1, 81).reshape(8, 10))
    assert np.array_equal(batch["targets"], np.arange(2, 82).reshape(8, 10))
    assert batch["inputs"].dtype == batch["targets"].dtype == np.int32
    assert batch["inputs"].flags.c_contiguous


def test_an_epoch_holds_every_example_once_and_the_next_another_order():
    found = rows(drawn(opened().stream(), 25))[:, 0]  # 200 examples: two epochs
    first, second = found[:100], found[100:]
    assert np.array_equal(np.sort(first), np.arange(1, 1001, 10))
    assert np.array_equal(np.sort(second), np.sort(first))
    assert not np.array_equal(first, second)


def test_epochs_end_where_they_were_asked_to():
    stream = opened(num_epochs=1).stream()
    assert len(list(stream)) == 100 // 8
    with pytest.raises(StopIteration):
        next(stream)
    stream.close()


@pytest.mark.parametrize("processes", [2, 4, 8])
def test_any_number_of_processes_sees_the_same_batches(processes):
    alone = drawn(opened().stream(), 3)
    parts = [
        drawn(opened(process_index=index, process_count=processes).stream(), 3)
        for index in range(processes)
    ]
    for number, whole in enumerate(alone):
        joined = np.concatenate([part[number]["targets"] for part in parts])
        assert np.array_equal(joined, whole["targets"])


@settings(max_examples=15, deadline=None)
@given(before=st.integers(0, 30), processes=st.sampled_from([1, 2, 4]))
def test_a_position_is_taken_up_exactly_by_any_number_of_processes(before, processes):
    uninterrupted = rows(drawn(opened().stream(), before + 3))
    first = opened().stream()
    for _ in range(before):
        next(first)
    state = json.loads(json.dumps(first.state()))  # as a checkpoint keeps it
    first.close()
    parts = []
    for index in range(processes):
        again = opened(process_index=index, process_count=processes).stream()
        again.restore(state)
        parts.append(drawn(again, 3))
    resumed = np.concatenate([parts[p][b]["inputs"] for b in range(3) for p in range(processes)])
    assert np.array_equal(resumed, uninterrupted[before * 8 :])


def test_the_position_does_not_count_what_was_only_read_ahead():
    stream = opened().stream()
    for _ in range(3):
        next(stream)
    assert stream.state()["consumed_examples"] == 24
    expected = next(stream)["inputs"]
    stream.restore({**stream.state(), "consumed_examples": 24})  # a roll-back, same stream
    assert np.array_equal(next(stream)["inputs"], expected)
    stream.close()


def test_another_batch_size_goes_on_at_the_same_example():
    state = {**opened().stream().state(), "consumed_examples": 24}
    other = opened(batch_size=4).stream()
    other.restore(state)
    assert np.array_equal(rows(drawn(other, 2)), rows(drawn(opened().stream(), 4))[24:32])


def test_an_older_order_is_refused():
    stream = opened().stream()
    with pytest.raises(TPUValidationError, match="orders examples differently"):
        stream.restore({**stream.state(), "order": 0})


class Counting(ArrayShard):
    """A shard that says how often it was read."""

    def read(self, spans):
        self.reads.append(len(spans))
        return super().read(spans)


def test_reading_goes_on_while_nobody_draws_and_stops_at_the_end():
    shard = Counting("counting", TOKENS)
    object.__setattr__(shard, "reads", [])
    data = dataclasses.replace(opened(), store=TokenStore((shard,), "array", "array"))
    stream = data.stream()
    next(stream)
    deadline = time.monotonic() + 30
    while len(shard.reads) < PREFETCH and time.monotonic() < deadline:
        time.sleep(0.001)
    assert len(shard.reads) >= PREFETCH
    assert stream.state()["consumed_examples"] == 8
    stream.close()
    after = len(shard.reads)
    time.sleep(0.05)
    assert len(shard.reads) == after


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"source": TOKENS + np.uint16(1)}, "the data differ"),
        ({"sequence_length": 20}, "examples had another length"),
        ({"seed": 1}, "another seed"),
        ({"shuffle": False}, "shuffling was switched on or off"),
    ],
)
def test_a_position_in_something_else_is_refused(changes, why):
    state = opened().stream().state()
    with pytest.raises(TPUValidationError, match=why):
        opened(**changes).stream().restore(state)


def test_a_damaged_position_is_refused():
    stream = opened().stream()
    with pytest.raises(TPUValidationError, match="consumed_examples='7'"):
        stream.restore({**stream.state(), "consumed_examples": "7"})


def test_waiting_is_counted():
    stream = opened().stream()
    next(stream)
    assert 0 < stream.waited_s < 60
    stream.close()


@given(
    cuts=st.lists(st.integers(0, 60), max_size=6),
    spans=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), min_size=1, max_size=8),
)
def test_spans_over_shards_are_spans_of_the_whole(cuts, spans):
    whole = np.arange(60, dtype=np.int64)
    parts = np.split(whole, sorted(cuts))
    store = TokenStore(tuple(ArrayShard(f"{n}", part) for n, part in enumerate(parts)), "", "")
    spans = [(min(span), max(span)) for span in spans if span[0] != span[1]] or [(0, 60)]
    found = store.read([start for start, _ in spans], [stop for _, stop in spans])
    for (start, stop), tokens in zip(spans, found, strict=True):
        assert np.array_equal(tokens, whole[start:stop])


def test_fingerprints_tell_content_not_storage():
    def mark(tokens):
        return TokenStore((ArrayShard("x", tokens),), "", "").fingerprint

    assert mark(TOKENS) == mark(TOKENS.astype(np.int32))
    assert mark(TOKENS) != mark(TOKENS[:-1])


def test_a_token_past_the_vocabulary_is_named_in_its_batch():
    stream = opened(vocab_size=1001, shuffle=False).stream()
    with pytest.raises(TPUValidationError, match=r"the token 1001.*vocab_size: 1002"):
        list(stream)
    stream.close()
    assert len(list(opened(vocab_size=1002, num_epochs=1).stream())) == 12


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32])
def test_negative_tokens_are_refused(dtype):
    tokens = np.arange(100).astype(dtype)
    tokens[50] = np.array(-1).astype(dtype) if dtype != np.uint32 else 2**31 + 5
    stream = opened(tokens).stream()
    with pytest.raises(TPUValidationError, match="contains the token -"):
        list(zip(range(3), stream, strict=False))
    stream.close()


@pytest.mark.parametrize(
    ("changes", "error", "why"),
    [
        ({"source": TOKENS[:0]}, TPUValidationError, "contains no tokens"),
        ({"source": TOKENS[:10]}, TPUValidationError, "10 tokens, fewer than one example"),
        ({"batch_size": 101, "num_epochs": 1}, TPUValidationError, "less than one batch of 101"),
        ({"source": TOKENS.astype(float)}, TPUValidationError, "contains float64; expected"),
        ({"source": TOKENS[:100].reshape(10, 10)}, TPUValidationError, "is 2-dimensional"),
        ({"batch_size": 9, "process_count": 2}, ConfigError, "choose a multiple of 2"),
        ({"batch_size": 0}, ConfigError, "batch_size=0"),
        ({"process_index": 3, "process_count": 2}, ConfigError, "process_index=3 is not in 0 … 1"),
        ({"seed": -1}, ConfigError, "seed=-1 is negative"),
        ({"num_epochs": 0}, ConfigError, "num_epochs=0"),
        ({"packing": "document"}, ConfigError, "Did you mean 'documents'"),
        ({"sequence_length": 0}, ConfigError, "sequence_length is 0"),
    ],
)
def test_what_cannot_be_is_refused(changes, error, why):
    with pytest.raises(error, match=why):
        opened(**changes)


def test_a_description_counts():
    found = opened().describe()
    assert (found.num_tokens, found.num_examples, found.kind) == (1001, 100, "array")
    assert json.loads(json.dumps(found.to_dict()))["dtype"] == "uint16"


class Slow(ArrayShard):
    """A shard that takes its time, as one in a bucket does, and counts who reads at once."""

    def __init__(self, *about):
        super().__init__(*about)
        self.reading, self.most = 0, 0
        self.lock = threading.Lock()

    def read(self, spans):
        with self.lock:
            self.reading += 1
            self.most = max(self.most, self.reading)
        time.sleep(0.05)
        with self.lock:
            self.reading -= 1
        return super().read(spans)


@pytest.mark.parametrize("workers", [1, 8])
def test_a_slow_source_is_read_by_several_readers_at_once(workers):
    shard = Slow("slow", TOKENS)
    store = TokenStore((shard,), "array", "array")
    changes = {"store": store, "num_workers": workers, "prefetch": 2 * workers}
    drawn(dataclasses.replace(opened(), **changes).stream(), 8 * 256 // 8)  # 256 rows a read
    assert (shard.most > 1) == (workers > 1)

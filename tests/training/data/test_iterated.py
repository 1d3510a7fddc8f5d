"""Iterables as data: rows of this process, epochs, and positions where they can be kept."""

import json

import numpy as np
import pytest

from tpukit.errors import TPUValidationError
from tpukit.training.data import open_data


def opened(source, **changes):
    settings = {"sequence_length": 3, "batch_size": 4, "process_index": 0, "process_count": 1}
    return open_data(source, **settings | changes)


def batch(number):
    return np.arange(16).reshape(4, 4) + 100 * number


BATCHES = [batch(number) for number in range(5)]


class Endless:
    """An iterator that knows where it is."""

    def __init__(self):
        self.at = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.at += 1
        return batch(self.at)

    def state(self):
        return {"at": self.at}

    def restore(self, state):
        self.at = state["at"]


@pytest.mark.parametrize(
    "element",
    [
        batch(0),
        (batch(0)[:, :-1], batch(0)[:, 1:]),
        {"inputs": batch(0)[:, :-1].tolist(), "targets": batch(0)[:, 1:]},
    ],
    ids=["tokens", "pair", "mapping"],
)
def test_batches_come_in_three_forms(element):
    found = next(opened([element]).stream())
    assert np.array_equal(found["inputs"], batch(0)[:, :3])
    assert np.array_equal(found["targets"], batch(0)[:, 1:])


def test_a_process_takes_its_rows_of_the_whole_or_what_it_is_given():
    second = opened(BATCHES, process_index=1, process_count=2).stream()
    assert np.array_equal(next(second)["inputs"], batch(0)[2:, :3])
    own = opened([batch(0)[:2]], process_index=1, process_count=2).stream()
    assert np.array_equal(next(own)["inputs"], batch(0)[:2, :3])


def test_a_list_starts_again_unless_epochs_end_it():
    stream = opened(BATCHES).stream()
    assert len([next(stream) for _ in range(12)]) == 12
    assert len(list(opened(BATCHES, num_epochs=2).stream())) == 10
    assert len(list(opened(iter(BATCHES)).stream())) == 5  # cannot start again


@pytest.mark.parametrize("source", [BATCHES, lambda: iter(BATCHES), Endless()])
def test_a_position_is_taken_up_exactly(source):
    stream = opened(source).stream()
    for _ in range(7):
        next(stream)
    state = json.loads(json.dumps(stream.state()))
    expected = [next(stream)["inputs"] for _ in range(3)]
    stream.restore(state)  # a roll-back
    assert np.array_equal([next(stream)["inputs"] for _ in range(3)], expected)
    fresh = opened(Endless() if isinstance(source, Endless) else source).stream()
    fresh.restore(state)
    assert np.array_equal([next(fresh)["inputs"] for _ in range(3)], expected)
    assert fresh.state()["batches"] == 10


def test_a_position_taken_by_one_process_serves_two():
    stream = opened(BATCHES).stream()
    expected = [next(stream)["inputs"] for _ in range(3)][2]
    state = {**stream.state(), "batches": 2}
    for index in range(2):
        part = opened(BATCHES, process_index=index, process_count=2).stream()
        part.restore(state)
        assert np.array_equal(next(part)["inputs"], expected[2 * index : 2 * index + 2])


def test_positions_that_cannot_be_are_refused():
    stream = opened(BATCHES).stream()
    next(stream)
    state = stream.state()
    with pytest.raises(TPUValidationError, match="its first batch differs"):
        opened(BATCHES[1:]).stream().restore(state)
    with pytest.raises(TPUValidationError, match="another kind of data"):
        opened(np.arange(100)).stream().restore(state)
    once = opened(iter(BATCHES)).stream()
    next(once)
    with pytest.raises(TPUValidationError, match="cannot start again"):
        once.restore(state)
    knows = opened(Endless()).stream()
    with pytest.raises(TPUValidationError, match="the state of an iterator"):
        opened(BATCHES).stream().restore(knows.state())


@pytest.mark.parametrize(
    ("element", "why"),
    [
        (np.zeros((3, 4), int), "expected 4 rows"),
        (np.zeros((4, 9), int), "expected rows of sequence_length=3"),
        (np.full((4, 4), 300), "yielded the token 300"),
        (np.zeros(4), "expected a mapping of arrays"),
        ("text", "text as a file with a tokenizer"),
    ],
)
def test_what_is_no_batch_is_refused(element, why):
    with pytest.raises(TPUValidationError, match=why):
        next(opened([element], vocab_size=256).stream())


def test_an_empty_iterable_is_refused():
    with pytest.raises(TPUValidationError, match="a list yields no batch"):
        next(opened([]).stream())


def test_data_need_not_be_tokens():
    images = {"image": np.zeros((4, 8, 8, 3), np.float32), "label": np.arange(4)}
    found = next(opened([images], sequence_length=None).stream())
    assert found["image"].shape == (4, 8, 8, 3)

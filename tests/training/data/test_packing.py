"""Documents packed into rows: each token once, none torn, hardly any padding."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpukit.errors import TPUValidationError
from tpukit.training.data.examples import DocumentExamples, pack_documents
from tpukit.training.data.token_store import ArrayShard, TokenStore


def offsets_of(lengths):
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


@given(lengths=st.lists(st.integers(0, 40), max_size=60), row_length=st.integers(1, 16))
def test_every_place_of_every_document_is_in_one_row(lengths, row_length):
    documents = offsets_of(lengths)
    packing = pack_documents(documents, row_length)
    covered = [
        place
        for start, length in zip(packing.starts, packing.lengths, strict=True)
        for place in range(start, start + length)
    ]
    expected = [
        place
        for start, length in zip(documents[:-1], lengths, strict=True)
        for place in range(start, start + length - 1)
    ]
    assert sorted(covered) == expected
    filled = [
        packing.lengths[first:last].sum()
        for first, last in zip(packing.row_offsets[:-1], packing.row_offsets[1:], strict=True)
    ]
    assert all(0 < count <= row_length for count in filled)


def test_rows_are_nearly_full():
    lengths = np.random.default_rng(0).lognormal(5, 1, 20_000).astype(int) + 2
    packing = pack_documents(offsets_of(lengths), 1024)
    assert packing.filled > 0.99
    # No packing can do with fewer rows than the places need.
    assert packing.num_rows <= np.ceil((lengths - 1).sum() / 1024) * 1.01


def test_rows_come_in_the_order_of_their_first_document():
    packing = pack_documents(offsets_of([5, 9, 3, 9, 2]), 8)
    first = packing.starts[packing.row_offsets[:-1]]
    assert np.array_equal(first, np.sort(first))


def examples_of(lengths, row_length):
    tokens = np.arange(1, sum(lengths) + 1)
    store = TokenStore((ArrayShard("array", tokens),), "array", "array", offsets_of(lengths))
    return DocumentExamples(store, row_length, None)


def test_a_batch_keeps_documents_apart():
    # Documents [1 2 3] [4 5] [6 7 8 9 10 11]; the last is cut.
    examples = examples_of([3, 2, 6], 4)
    batch = examples.read(np.arange(len(examples))[None])[0]
    assert batch["inputs"].tolist() == [[1, 2, 4, 10], [6, 7, 8, 9]]
    assert batch["targets"].tolist() == [[2, 3, 5, 11], [7, 8, 9, 10]]
    assert batch["segment_ids"].tolist() == [[1, 1, 2, 3], [1, 1, 1, 1]]
    assert batch["positions"].tolist() == [[0, 1, 0, 0], [0, 1, 2, 3]]
    assert all(value.dtype == np.int32 for value in batch.values())


def test_batches_read_together_are_those_read_alone():
    examples = examples_of([3, 2, 6, 9, 1, 4, 4, 4], 4)
    numbers = np.random.default_rng(0).permutation(len(examples))[:6].reshape(3, 2)
    for row, batch in zip(numbers, examples.read(numbers), strict=True):
        alone = examples.read(row[None])[0]
        assert all(np.array_equal(batch[key], alone[key]) for key in alone)


def test_padding_has_no_target_and_no_document():
    batch = examples_of([3], 4).read(np.array([[0]]))[0]
    assert batch["inputs"].tolist() == [[1, 2, 0, 0]]
    assert batch["targets"].tolist() == [[2, 3, -1, -1]]
    assert batch["segment_ids"].tolist() == [[1, 1, 0, 0]]


def test_documents_must_be_known():
    store = TokenStore((ArrayShard("array", np.arange(9)),), "array", "array")
    with pytest.raises(TPUValidationError, match="does not record where documents start"):
        DocumentExamples(store, 4, None)

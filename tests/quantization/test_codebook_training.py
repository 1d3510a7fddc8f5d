"""`train_codebook` beside k-means in float64 numpy, and what it promises."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from tpukit.errors import TPUValidationError
from tpukit.quantization import Codebook, train_codebook


def error_of(table, vectors, weights=None):
    lost = (vectors[:, None].astype(np.float64) - np.asarray(table, np.float64)[None]) ** 2
    lost = lost if weights is None else lost * weights[:, None]
    return lost.sum(2).min(1).sum() / (vectors.size if weights is None else weights.sum())


def lloyd(vectors, entries, passes=40, weights=None):
    """k-means in float64, from random vectors."""
    table = vectors[np.random.default_rng(1).choice(len(vectors), entries, replace=False)]
    table = table.astype(np.float64)
    each = np.ones(vectors.shape) if weights is None else weights
    for _ in range(passes):
        codes = (each[:, None] * (vectors[:, None] - table[None]) ** 2).sum(2).argmin(1)
        for entry in range(entries):
            mine = codes == entry
            if mine.any():
                table[entry] = (each[mine] * vectors[mine]).sum(0) / each[mine].sum(0)
    return table


def gaussian(count, length, seed=0):
    return np.random.default_rng(seed).standard_normal((count, length)).astype(np.float32)


def test_it_is_as_good_as_k_means_in_float64():
    vectors = gaussian(3000, 4)
    book = train_codebook(vectors, entries=32, length=4, iterations=40, dtype="float32")
    ours, theirs = (error_of(table, vectors) for table in (book.values[0], lloyd(vectors, 32)))
    assert ours <= theirs * 1.01
    assert book.fit.error == pytest.approx(ours, rel=0.01)


def test_history_falls_and_converges():
    book = train_codebook(gaussian(4000, 2), entries=16, length=2, iterations=200)
    assert book.fit.converged
    assert book.fit.iterations < 200
    history = np.array(book.fit.history)
    assert (np.diff(history) <= 1e-4 * history[:-1]).all()


def test_weights_of_values_are_those_of_the_objective():
    vectors = gaussian(2000, 4)
    weights = np.random.default_rng(3).uniform(0.01, 10, vectors.shape).astype(np.float32)
    book = train_codebook(
        vectors, entries=24, length=4, weights=weights, iterations=40, dtype="float32"
    )
    theirs = error_of(lloyd(vectors, 24, weights=weights), vectors, weights)
    assert error_of(book.values[0], vectors, weights) <= theirs * 1.02
    plain = train_codebook(vectors, entries=24, length=4, iterations=40, dtype="float32")
    assert error_of(book.values[0], vectors, weights) < error_of(plain.values[0], vectors, weights)


def test_a_vector_without_weight_is_not_there():
    vectors = np.concatenate([gaussian(1000, 4), gaussian(1000, 4) + 100])
    weights = np.repeat([1.0, 0.0], 1000)
    book = train_codebook(vectors, entries=8, length=4, weights=weights)
    assert np.abs(np.asarray(book.values)).max() < 10


def test_clusters_far_apart_are_all_found():
    """k-means++ and respawning: random entries would leave some clusters without one."""
    centres = 100 * gaussian(64, 8, seed=5)
    vectors = np.repeat(centres, 40, axis=0) + 0.01 * gaussian(64 * 40, 8)
    book = train_codebook(vectors, entries=64, length=8, dtype="float32")
    assert error_of(book.values[0], vectors) < 0.01


def test_empty_entries_move_to_where_the_error_is():
    vectors = np.repeat(gaussian(40, 2), 50, axis=0)
    book = train_codebook(vectors, entries=40, length=2, iterations=50, dtype="float32")
    assert error_of(book.values[0], vectors) < 1e-3
    alike = train_codebook(np.ones((500, 2)), entries=16, length=2)
    assert np.allclose(np.asarray(alike.decode(jnp.zeros((1, 1), jnp.uint8))), 1, atol=0.01)


def test_the_same_seed_gives_the_same_codebook():
    one, two, other = (
        train_codebook(gaussian(2000, 4), entries=16, length=4, seed=seed) for seed in (3, 3, 4)
    )
    assert np.array_equal(one.entries, two.entries)
    assert not np.array_equal(one.entries, other.entries)


def test_eight_devices_are_one():
    vectors = gaussian(5003, 4) + 3
    weights = np.random.default_rng(0).uniform(0.5, 2, 5003)
    mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("a", "b"))
    kept = {"entries": 16, "length": 4, "batch": 1000, "dtype": "float32", "weights": weights}
    for passes in (1, 12):
        one = train_codebook(vectors, iterations=passes, **kept)
        eight = train_codebook(vectors, iterations=passes, mesh=mesh, **kept)
        np.testing.assert_allclose(one.fit.history, eight.fit.history, rtol=1e-3)
        if passes == 1:  # later on, what lies between two entries may go to the other one
            np.testing.assert_allclose(one.values, eight.values, atol=1e-4)


def test_batches_grow_to_all_vectors():
    vectors = gaussian(8000, 4)
    part = train_codebook(vectors, entries=32, length=4, batch=500, iterations=30, dtype="float32")
    whole = train_codebook(vectors, entries=32, length=4, iterations=30, dtype="float32")
    held_out = gaussian(4000, 4, seed=9)
    assert error_of(part.values[0], held_out) <= 1.01 * error_of(whole.values[0], held_out)


def test_cosine_fits_directions_and_says_what_a_gain_costs():
    random = np.random.default_rng(0)
    ways = gaussian(8, 6, seed=2)
    vectors = ways[random.integers(0, 8, 2000)] * random.uniform(0.1, 50, (2000, 1))
    book = train_codebook(vectors, entries=8, length=6, metric="cosine", dtype="float32")
    table = np.asarray(book.values[0])
    np.testing.assert_allclose(np.linalg.norm(table, axis=1), 1, atol=1e-5)
    units = ways / np.linalg.norm(ways, axis=1, keepdims=True)
    assert ((units @ table.T).max(1) > 0.999).all()
    assert book.gain_bits == 16
    assert book.bits_per_value == pytest.approx((3 + 16) / 6)
    assert "16 bits" in book.fit.notes[0]


def test_dot_is_bounded():
    vectors = gaussian(2000, 4) * np.random.default_rng(0).uniform(0.1, 10, (2000, 1))
    book = train_codebook(vectors, entries=16, length=4, metric="dot_product", dtype="float32")
    bound = np.sqrt((vectors**2).sum(1).mean())
    assert (np.linalg.norm(book.values[0], axis=1) <= bound * 1.0001).all()
    assert book.metric == "dot"


def test_vectors_as_long_as_512_work():
    book = train_codebook(gaussian(300, 512), entries=64, length=512, iterations=5)
    assert isinstance(book, Codebook)
    assert book.entries.shape == (1, 64, 512)
    assert book.bits_per_value == 6 / 512


def test_progress_hears_of_every_pass():
    lines: list[str] = []
    book = train_codebook(gaussian(500, 4), entries=8, length=4, progress=lines.append)
    assert len(lines) == book.fit.iterations
    assert lines[0].done == 1
    assert "error" in lines[0]


def test_rounding_to_int8_costs_little():
    vectors = gaussian(3000, 4)
    book = train_codebook(vectors, entries=64, length=4)
    exact = train_codebook(vectors, entries=64, length=4, dtype="float32")
    assert book.entries.dtype == jnp.int8
    assert error_of(book.values[0], vectors) <= 1.003 * error_of(exact.values[0], vectors)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"entries": 1}, "entries=1"),
        ({"entries": 70_000}, "65536"),
        ({"entries": 200}, "cannot fit 200 entries"),
        ({"length": 3}, "cannot be cut into vectors of 3"),
        ({"length": 0}, "length=0"),
        ({"iterations": 0}, "iterations=0"),
        ({"metric": "euclid"}, "Did you mean 'euclidean'"),
        ({"weights": np.ones(7)}, "weights are"),
        ({"weights": -np.ones(100)}, "not negative"),
        ({"weights": np.zeros(100)}, "not all zero"),
        ({"data": np.full((100, 4), np.nan)}, "not finite"),
    ],
)
def test_what_cannot_be_is_said(changed, said):
    kept = {"data": gaussian(100, 4), "entries": 8, "length": 4} | changed
    with pytest.raises(TPUValidationError, match=said):
        train_codebook(kept.pop("data"), **kept)

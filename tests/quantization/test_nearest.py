"""The nearest entry, in every form, beside float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpukit.quantization.codebooks.nearest import form_for, nearest, nearest_in_chunk

FORMS = ("loop", "stream", "fused", "product")
found = jax.jit(nearest_in_chunk, static_argnames="form")


def scores_of(vectors, entries, weights=None):
    lost = (vectors[:, None].astype(np.float64) - entries[None]) ** 2
    return (lost if weights is None else lost * weights[:, None]).sum(2)


def assert_nearest(codes, scores, slack=2.0**-10):
    """Codes may differ from argmin's only where two entries are as near to each other's digits."""
    codes = np.asarray(codes)
    chosen = scores[np.arange(len(codes)), codes]
    assert (chosen <= scores.min(1) * (1 + slack) + 1e-5).all()
    assert (codes == scores.argmin(1)).mean() > 0.99


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("length", "entries"), [(4, 256), (8, 100), (3, 7), (1, 2)])
def test_every_form_finds_the_nearest(form, length, entries):
    random = np.random.default_rng(length)
    vectors = random.standard_normal((700, length)).astype(np.float32)
    table = random.standard_normal((entries, length)).astype(np.float32)
    codes = found(jnp.asarray(vectors.T), jnp.asarray(table), form=form)
    assert_nearest(codes, scores_of(vectors, table))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e6])
def test_weights_of_values_count(form, scale):
    random = np.random.default_rng(0)
    vectors = random.standard_normal((500, 4)).astype(np.float32)
    table = random.standard_normal((64, 4)).astype(np.float32)
    weights = (scale * random.uniform(0.01, 10, (500, 4))).astype(np.float32)
    codes = found(jnp.asarray(vectors.T), jnp.asarray(table), jnp.asarray(weights.T), form=form)
    scores = scores_of(vectors, table, weights) / scale
    assert_nearest(codes, scores)


@pytest.mark.parametrize("form", FORMS)
def test_a_bound_asks_for_the_largest_product(form):
    random = np.random.default_rng(0)
    vectors = random.standard_normal((400, 8)).astype(np.float32)
    table = random.standard_normal((50, 8)).astype(np.float32)
    bound = jnp.float32(np.linalg.norm(table, axis=1).max())
    codes = np.asarray(found(jnp.asarray(vectors.T), jnp.asarray(table), form=form, bound=bound))
    products = vectors @ table.T
    assert (codes == products.argmax(1)).mean() > 0.98


@pytest.mark.parametrize("form", FORMS)
def test_entries_themselves_are_found(form):
    """A vector that is an entry scores zero, where rounding could make it less."""
    table = np.random.default_rng(0).standard_normal((128, 8)).astype(np.float32)
    codes = found(jnp.asarray(table.T), jnp.asarray(table), form=form)
    assert np.array_equal(np.asarray(codes), np.arange(128))


def test_many_vectors_and_many_entries():
    random = np.random.default_rng(0)
    vectors = random.standard_normal((600, 2)).astype(np.float32)
    table = random.standard_normal((5000, 2)).astype(np.float32)
    codes = nearest(jnp.asarray(vectors), jnp.asarray(table))
    assert_nearest(codes, scores_of(vectors, table))


def test_the_form_follows_platform_and_size():
    assert form_for(8, 1024, "cpu") == "loop"
    assert form_for(512, 1024, "cpu") == "product"
    assert form_for(8, 1024, "gpu") == form_for(8, 1024, "tpu") == "fused"
    assert form_for(4, 65_536, "cpu") == "product"
    assert form_for(8, 1024, "gpu", 1_000_000) == "stream"
    assert form_for(8, 1024, "tpu", 1_000_000) == "fused"
    assert form_for(512, 1024, "gpu", 1_000_000) == "product"

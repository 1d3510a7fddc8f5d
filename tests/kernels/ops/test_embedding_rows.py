"""The gradient of looked-up rows against sums in float64, however tokens crowd."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from tpukit.kernels.ops.embedding_rows import (
    PASSES,
    embedding_rows,
    has_kernel,
    sum_by_row,
    triton_backward,
)
from tpukit.models import get_preset
from tpukit.models.transformer import layers


def in_float64(values, at, rows):
    sums = np.zeros((rows, values.shape[1]))
    np.add.at(sums, np.asarray(at), np.asarray(values, np.float64))
    return sums


@settings(max_examples=15, deadline=None)
@given(
    st.integers(1, 5),
    st.lists(st.integers(0, 4), min_size=1, max_size=80),
    st.sampled_from([128, 384]),
)
def test_every_row_is_the_sum_of_its_tokens(rows, at, width):
    at = jnp.asarray(at) % rows
    values = jax.random.normal(jax.random.key(len(at)), (at.size, width))
    found = sum_by_row(values, at, rows, dtype=jnp.float32, interpret=True)
    np.testing.assert_allclose(found, in_float64(values, at, rows), rtol=1e-5, atol=1e-5)


def test_a_crowded_row_is_rounded_once():
    # Added one by one in bfloat16, a sum stands still at 256: 256 + 1 is 256.
    values, at = jnp.ones((700, 128), jnp.bfloat16), jnp.zeros(700, jnp.int32)
    found = sum_by_row(values, at, 2, dtype=jnp.bfloat16, interpret=True)
    np.testing.assert_array_equal(found[0].astype(jnp.float32), float(jnp.bfloat16(700)))
    np.testing.assert_array_equal(found[1].astype(jnp.float32), 0)


@pytest.mark.parametrize("backward", [partial(triton_backward, interpret=True), None])
def test_numbers_outside_the_table_go_where_they_were_read(backward):
    table, ids = jax.random.normal(jax.random.key(0), (6, 128)), jnp.asarray([[-1, 0], [5, 9]])
    rows, pull = jax.vjp(lambda table: embedding_rows(table, ids), table)
    np.testing.assert_array_equal(rows, table[ids])
    if backward is None:
        (gradient,) = pull(jnp.ones((2, 2, 128)))
    else:
        _, kept = PASSES["triton"].forward(table, ids)
        gradient, _ = backward(kept, jnp.ones((2, 2, 128)))
    np.testing.assert_array_equal(gradient[:, 0], [1, 0, 0, 0, 0, 3])


@pytest.mark.parametrize(("width", "taken"), [(2048, True), (384, True), (96, False)])
def test_widths(width, taken):
    assert has_kernel(jnp.zeros((2, width))) is taken


@pytest.mark.parametrize("alone", [True, False])
def test_a_model_on_one_gpu_has_the_kernel(monkeypatch, alone):
    monkeypatch.setattr(layers, "on_one_gpu", lambda: alone)
    graph, state = nnx.split(layers.Embedding(64, 128, get_preset("tiny"), rngs=nnx.Rngs(0)))

    def loss(state, ids):
        return nnx.merge(graph, state)(ids).astype(jnp.float32).sum()

    traced = jax.jit(jax.grad(loss)).trace(state, jnp.zeros((2, 8), jnp.int32))
    assert ("summed_by_row" in traced.lower(lowering_platforms=("cuda",)).as_text()) is alone

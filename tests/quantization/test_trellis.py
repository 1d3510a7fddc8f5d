"""The trellis code: packing, closed runs, and the search beside trying everything."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tpukit.quantization import output_error, quantize_matrix
from tpukit.quantization.vector_codes.choice import search_closed_runs
from tpukit.quantization.vector_codes.trellis import (
    _search,
    first_table,
    pack_bits,
    search_runs,
    unpack_bits,
    windows_of,
)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_symbols_are_packed_without_waste(bits):
    symbols = np.random.default_rng(0).integers(0, 2**bits, (3, 16))
    packed = pack_bits(jnp.asarray(symbols), bits)
    assert packed.shape == (3, 16 * bits // 8)
    assert np.array_equal(unpack_bits(packed, bits), symbols)


def test_windows_hold_the_last_bits_of_a_closed_run():
    symbols = np.random.default_rng(0).integers(0, 4, 16)
    found = np.asarray(windows_of(jnp.asarray(symbols), bits=2, window=6))
    expected = [symbols[i] + 4 * symbols[i - 1] + 16 * symbols[i - 2] for i in range(16)]
    assert np.array_equal(found, expected)


def test_the_search_finds_the_best_path():
    """Beside all 4^6 ways through six weights, from and to one state."""
    table = first_table(4, seed=1)
    values = jax.random.normal(jax.random.key(0), (1, 6))
    weights = jnp.asarray([[1.0, 2.0, 0.5, 1.0, 3.0, 1.0]])
    start = jnp.asarray([2])
    found = np.asarray(jax.jit(_search, static_argnums=3)(values, weights, table, 2, start))[0]
    levels = np.asarray(table)
    steps = np.stack([values[0], weights[0]], axis=1).tolist()

    def cost(path):
        state, total = 2, 0.0
        for symbol, (value, weight) in zip(path, steps, strict=True):
            window = state * 4 + symbol
            total += weight * (value - levels[window]) ** 2
            state = window % 4
        return total if state == 2 else np.inf

    best = min(itertools.product(range(4), repeat=6), key=cost)
    assert tuple(found % 4) == best


def test_runs_are_closed_and_lose_less_than_four_levels():
    values = jax.random.normal(jax.random.key(0), (24, 64))
    table = first_table(8)
    found = jax.jit(search_runs, static_argnames="bits")(
        values, jnp.ones_like(values), table, bits=2
    )
    assert np.array_equal(found, windows_of(found & 3, bits=2, window=8))
    # Lloyd and Max: 0.1175 for any four levels.
    assert float(((values - table[found]) ** 2).mean()) < 0.1


@pytest.mark.slow
def test_a_matrix_in_a_trellis():
    weight = np.random.default_rng(0).standard_normal((16, 40))
    made = quantize_matrix(weight, format="trellis2:64")
    assert made.codes.shape == (1, 16, 10)
    assert made.layout == "trellis2"
    assert output_error(weight, made) < 0.09
    x = jnp.ones((2, 16))
    np.testing.assert_allclose(x @ made, x @ made.dequantize(), rtol=1e-4)


@pytest.mark.parametrize(("bits", "window", "length"), [(2, 5, 5), (3, 6, 4)])
def test_products_find_the_best_closed_run(bits, window, length):
    """Beside all closed runs there are; by steps, the beginning is a guess."""
    table = first_table(window, seed=1)
    values = jax.random.normal(jax.random.key(window), (2, length))
    weights = jnp.linspace(0.5, 2, 2 * length).reshape(2, length)
    search = jax.jit(search_closed_runs, static_argnames="bits")
    found = search(values, weights, table, bits=bits)
    assert np.array_equal(windows_of(found & (2**bits - 1), bits=bits, window=window), found)
    symbols = np.array(list(itertools.product(range(2**bits), repeat=length)))
    every = np.asarray(table)[windows_of(jnp.asarray(symbols), bits=bits, window=window)]
    for run in range(2):
        costs = (np.asarray(weights[run]) * (np.asarray(values[run]) - every) ** 2).sum(1)
        own = (weights[run] * (values[run] - table[found[run]]) ** 2).sum()
        assert own == pytest.approx(costs.min(), rel=1e-5)

"""Trellis codes: `bits` new bits per weight, each weight decoded from the last `window` bits.

Neighbours share bits, so a weight at 2 bits has 2^window possible values instead of four, and
decoding is one look-up. Viterbi's search finds the best bits of a whole run of neighbours. Runs are
closed: the window of the first weight begins with the last bits of the run, so no bit is spent on
an initial state. Over runs of 128 Gaussian weights at 2 bits the error is smaller than that of a
lattice of 8 dimensions (see docs/quantization.md).

A window's lowest bits are its newest. A state is a window without its oldest `bits`.
"""

from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import ndtri

RUN = 128
"""Neighbouring weights that are searched together, at most."""


def run_length(width: int) -> int:
    """Return the weights per run for rows of a width: up to 128, equal runs of whole bytes."""
    runs = -(-width // RUN)
    return -(-width // (8 * runs)) * 8


def padded_width(width: int) -> int:
    """Return the width rounded up to whole runs."""
    return -(-width // RUN) * run_length(width)


def first_table(window: int, seed: int = 0) -> jax.Array:
    """Return initial values float32 (2^window,): a shuffled normal distribution."""
    size = 2**window
    order = np.random.default_rng(seed).permutation(size)
    return ndtri((jnp.asarray(order, jnp.float32) + 0.5) / size)


def _search(
    values: jax.Array, weights: jax.Array, table: jax.Array, bits: int, start: jax.Array | None
) -> jax.Array:
    """Return windows (runs, length) with the smallest weighted squared error, closed at `start`."""
    fan = 2**bits
    states = table.shape[0] // fan
    by_oldest = table.reshape(fan, states)
    runs = values.shape[0]
    everywhere = jnp.arange(states)
    cost = jnp.zeros((runs, states))
    if start is not None:
        cost = jnp.where(everywhere == start[:, None], cost, 1e30)

    def step(cost: jax.Array, now: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        value, weight = now[0][:, None], now[1][:, None]
        before = cost.reshape(runs, fan, states // fan)
        best = jnp.full((runs, states), jnp.inf)
        oldest = jnp.zeros((runs, states), jnp.uint8)
        for choice in range(fan):
            came = jnp.repeat(before[:, choice], fan, axis=1)
            made = came + weight * (value - by_oldest[choice]) ** 2
            oldest = jnp.where(made < best, jnp.uint8(choice), oldest)
            best = jnp.minimum(made, best)
        return best, oldest

    cost, oldest = jax.lax.scan(step, cost, (values.T, weights.T))
    last = jnp.argmin(cost, axis=1) if start is None else start

    def back(state: jax.Array, pointers: jax.Array) -> tuple[jax.Array, jax.Array]:
        choice = jnp.take_along_axis(pointers, state[:, None], axis=1)[:, 0].astype(jnp.int32)
        seen = choice * states + state
        return seen >> bits, seen

    return jax.lax.scan(back, last.astype(jnp.int32), oldest, reverse=True)[1].T


def search_runs(values: jax.Array, weights: jax.Array, table: jax.Array, *, bits: int) -> jax.Array:
    """Return int32 windows (runs, length) of closed runs with a small weighted squared error.

    A first search, rotated by half a run, chooses the state in which the run starts and ends.
    """
    half = values.shape[1] // 2
    turned = _search(jnp.roll(values, half, 1), jnp.roll(weights, half, 1), table, bits, None)
    start = turned[:, half - 1] & (table.shape[0] // 2**bits - 1)
    return _search(values, weights, table, bits, start)


def windows_of(symbols: jax.Array, *, bits: int, window: int) -> jax.Array:
    """Return int32 windows of closed runs (..., length) of new bits, each 0 … 2^bits − 1."""
    windows = symbols.astype(jnp.int32)
    made = windows
    for age in range(1, -(-window // bits)):
        made = made | jnp.roll(windows, age, axis=-1) << (bits * age)
    return made & (2**window - 1)


def pack_bits(symbols: jax.Array, bits: int) -> jax.Array:
    """Pack symbols (..., n) to uint8 (..., n · bits / 8), the first in the highest bits."""
    places = jnp.arange(bits - 1, -1, -1)
    single = (symbols[..., None].astype(jnp.int32) >> places) & 1
    return jnp.packbits(single.reshape(*symbols.shape[:-1], -1).astype(jnp.uint8), axis=-1)


def unpack_bits(packed: jax.Array, bits: int) -> jax.Array:
    """Return the int32 symbols that `pack_bits` packed."""
    single = jnp.unpackbits(packed, axis=-1).reshape(*packed.shape[:-1], -1, bits)
    places = jnp.arange(bits - 1, -1, -1)
    return (single.astype(jnp.int32) << places).sum(-1)


@lru_cache(maxsize=8)
def gaussian_table(bits: int, window: int, passes: int = 8) -> np.ndarray:
    """Return values float32 (2^window,) fitted to Gaussian weights by k-means; deterministic."""
    size = 2**window
    values = jax.random.normal(jax.random.key(0), (max(64, 16 * size // RUN), RUN))
    ones = jnp.ones_like(values)
    table = first_table(window)
    for _ in range(passes):
        table = _fit(values, ones, table, bits=bits)
    return np.asarray(table)


@partial(jax.jit, static_argnames="bits")
def _fit(values: jax.Array, weights: jax.Array, table: jax.Array, *, bits: int) -> jax.Array:
    windows = search_runs(values, weights, table, bits=bits).reshape(-1)
    each = weights.reshape(-1)
    total = jax.ops.segment_sum(each * values.reshape(-1), windows, table.shape[0])
    mass = jax.ops.segment_sum(each, windows, table.shape[0])
    # A window that few weights chose stays nearer to where it was.
    return (total + table) / (mass + 1)

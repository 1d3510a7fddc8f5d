"""Viterbi's search of short trellises as a tree of products, for processors that take many at once.

A run of weights is a path of states. The least cost of every path from state a to state b over two
stretches is a product of matrices with (min, +) in place of (+, ×), so a whole run is a tree of
such products: seven of them deep for 128 weights, where Viterbi's search takes 128 steps forward
and 128 back. The least path that ends where it began is on the diagonal of the last one, so a
closed run needs no second search to guess its beginning.
"""

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np

MOST_STATES = 64
"""More make products that cost more than steps do."""
_NEVER = 1e30


@lru_cache(maxsize=16)
def _paths(bits: int, window: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Windows (steps, states, states) on the one way between two states, and whether there is one.

    Args:
        bits: New bits of each weight.
        window: Bits that a weight is decoded from.
        steps: So few that all new bits are in the state they end in.
    """
    held, new = window - bits, steps * bits
    before, after = np.meshgrid(np.arange(2**held), np.arange(2**held), indexing="ij")
    joined = before << new | after & (2**new - 1)
    possible = after >> new == before & (2 ** (held - new) - 1)
    ages = range(steps - 1, -1, -1)
    return np.stack([joined >> age * bits & (2**window - 1) for age in ages]), possible


def search_closed_runs(
    values: jax.Array, weights: jax.Array, table: jax.Array, *, bits: int
) -> jax.Array:
    """int32 windows (runs, length) of closed runs with the least weighted squared error.

    Args:
        values: float32 (runs, length).
        weights: Of the same shape: how much each counts.
        table: float32 (2^window,), of at most `MOST_STATES` states.
        bits: New bits of each weight.
    """
    runs, length = values.shape
    window = (table.shape[0] - 1).bit_length()
    states = table.shape[0] >> bits
    stride = min(length, (window - bits) // bits)
    rest = length % stride
    pieces = [(0, length // stride, stride)] + ([(length - rest, 1, rest)] if rest else [])

    def costs(first: int, count: int, steps: int) -> jax.Array:
        """(runs, count, states, states) of stretches of so many weights."""
        windows, possible = _paths(bits, window, steps)
        part = slice(first, first + count * steps)
        found = jnp.zeros((runs, count, states, states))
        for age in range(steps):
            value, weight = (
                array[:, part].reshape(runs, count, steps)[:, :, age, None, None]
                for array in (values, weights)
            )
            found = found + weight * (value - table[windows[age]]) ** 2
        return jnp.where(possible, found, _NEVER)

    whole = jnp.concatenate([costs(*piece) for piece in pieces], axis=1)
    stretches = whole.shape[1]
    missing = (1 << (stretches - 1).bit_length()) - stretches
    # Stretches of no weights: from every state to itself.
    nothing = jnp.where(jnp.eye(states, dtype=bool), 0.0, _NEVER)
    filler = jnp.broadcast_to(nothing, (runs, missing, states, states))
    levels = [jnp.concatenate([whole, filler], axis=1)]
    while levels[-1].shape[1] > 1:
        left, right = levels[-1][:, 0::2], levels[-1][:, 1::2]
        levels.append(jnp.min(left[..., :, None] + right[:, :, None], axis=-2))
    closed = jnp.diagonal(levels[-1][:, 0], axis1=1, axis2=2)
    start = jnp.argmin(closed, axis=1)[:, None]
    ends = jnp.concatenate([start, start], axis=1)  # states between stretches of a level
    for level in reversed(levels[:-1]):
        ends = _with_middles(level, ends)
    found = [
        _windows(_paths(bits, window, steps)[0], ends[:, place : place + count + 1])
        for place, (_, count, steps) in zip((0, length // stride), pieces, strict=False)
    ]
    return jnp.concatenate(found, axis=1)


def _with_middles(level: jax.Array, ends: jax.Array) -> jax.Array:
    """States between the stretches of a level, of those between pairs of them."""
    rows = jnp.take_along_axis(level[:, 0::2], ends[:, :-1, None, None], axis=2)[:, :, 0]
    columns = jnp.take_along_axis(level[:, 1::2], ends[:, 1:, None, None], axis=3)[..., 0]
    middle = jnp.argmin(rows + columns, axis=-1)
    pairs = jnp.stack([ends[:, :-1], middle], axis=2).reshape(ends.shape[0], -1)
    return jnp.concatenate([pairs, ends[:, -1:]], axis=1)


def _windows(paths: np.ndarray, ends: jax.Array) -> jax.Array:
    """(runs, weights): the windows on the ways between states."""
    found = jnp.asarray(paths)[:, ends[:, :-1], ends[:, 1:]]  # (steps, runs, stretches)
    return jnp.moveaxis(found, 0, 2).reshape(ends.shape[0], -1).astype(jnp.int32)

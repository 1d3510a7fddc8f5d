"""Choose codes: the nearest entry, or the best path through a trellis.

A run of weights is a path of trellis states. The smallest cost of every path from state a to state
b over two stretches is a (min, +) matrix product, so a whole run is a tree of such products: seven
levels for 128 weights, where Viterbi's search takes 128 steps forward and 128 back. The best path
that ends in its first state is on the diagonal of the last product, so a closed run needs no second
search for its first state.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

from ..codebooks.nearest import Form, form_for, nearest_in_chunk
from ..formats import VQFormat
from .trellis import run_length, search_runs

MOST_STATES = 64
"""More make products that cost more than steps do."""
_NEVER = 1e30


@lru_cache(maxsize=16)
def _paths(bits: int, window: int, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Return windows (steps, states, states) on the path between two states, and whether it exists.

    Args:
        bits: New bits per weight.
        window: Bits from which a weight is decoded.
        steps: Length of the path, so short that the last state has all its new bits.
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
    """Return int32 windows (runs, length) of closed runs with the smallest weighted squared error.

    Args:
        values: float32 (runs, length).
        weights: Factors of squared errors, of the same shape.
        table: float32 (2^window,), of at most `MOST_STATES` states.
        bits: New bits per weight.
    """
    runs, length = values.shape
    window = (table.shape[0] - 1).bit_length()
    states = table.shape[0] >> bits
    stride = min(length, (window - bits) // bits)
    rest = length % stride
    pieces = [(0, length // stride, stride)] + ([(length - rest, 1, rest)] if rest else [])

    def costs(first: int, count: int, steps: int) -> jax.Array:
        """Return costs (runs, count, states, states) of stretches of so many weights."""
        windows, possible = _paths(bits, window, steps)
        part = slice(first, first + count * steps)
        total = jnp.zeros((runs, count, states, states))
        for age in range(steps):
            value, weight = (
                array[:, part].reshape(runs, count, steps)[:, :, age, None, None]
                for array in (values, weights)
            )
            total = total + weight * (value - table[windows[age]]) ** 2
        return jnp.where(possible, total, _NEVER)

    all_costs = jnp.concatenate([costs(*piece) for piece in pieces], axis=1)
    stretches = all_costs.shape[1]
    missing = (1 << (stretches - 1).bit_length()) - stretches
    # Stretches of no weights: from every state to itself.
    nothing = jnp.where(jnp.eye(states, dtype=bool), 0.0, _NEVER)
    filler = jnp.broadcast_to(nothing, (runs, missing, states, states))
    levels = [jnp.concatenate([all_costs, filler], axis=1)]
    while levels[-1].shape[1] > 1:
        left, right = levels[-1][:, 0::2], levels[-1][:, 1::2]
        levels.append(jnp.min(left[..., :, None] + right[:, :, None], axis=-2))
    closed = jnp.diagonal(levels[-1][:, 0], axis1=1, axis2=2)
    start = jnp.argmin(closed, axis=1)[:, None]
    ends = jnp.concatenate([start, start], axis=1)  # states between stretches of a level
    for level in reversed(levels[:-1]):
        ends = _with_middles(level, ends)
    windows_of_pieces = [
        _windows(_paths(bits, window, steps)[0], ends[:, place : place + count + 1])
        for place, (_, count, steps) in zip((0, length // stride), pieces, strict=False)
    ]
    return jnp.concatenate(windows_of_pieces, axis=1)


def _with_middles(level: jax.Array, ends: jax.Array) -> jax.Array:
    """Return the states between stretches of a level from those between pairs of stretches."""
    rows = jnp.take_along_axis(level[:, 0::2], ends[:, :-1, None, None], axis=2)[:, :, 0]
    columns = jnp.take_along_axis(level[:, 1::2], ends[:, 1:, None, None], axis=3)[..., 0]
    middle = jnp.argmin(rows + columns, axis=-1)
    pairs = jnp.stack([ends[:, :-1], middle], axis=2).reshape(ends.shape[0], -1)
    return jnp.concatenate([pairs, ends[:, -1:]], axis=1)


def _windows(paths: np.ndarray, ends: jax.Array) -> jax.Array:
    """Return the windows (runs, weights) on the paths between states."""
    windows = jnp.asarray(paths)[:, ends[:, :-1], ends[:, 1:]]  # (steps, runs, stretches)
    return jnp.moveaxis(windows, 0, 2).reshape(ends.shape[0], -1).astype(jnp.int32)


# Blocks of rows that an accelerator chooses codes for at a time.
_TOGETHER = 32


class CodeChoice(Protocol):
    """Chooses codes. Equal choices compare equal, so that they share a compiled program."""

    def codes(self, wanted: jax.Array, tables: jax.Array, squares: jax.Array) -> jax.Array:
        """Return codes (stages, n) of vectors (length, n) by tables (stages, entries, length).

        `squares` (n,) are weights of vectors.
        """
        ...

    def shared(self, losses: jax.Array) -> jax.Array:
        """Return losses (n,) summed over codes that are chosen together."""
        ...


@dataclass(frozen=True)
class NearestChoice:
    """The nearest entry: stage by stage, then each stage again with the others fixed.

    Attributes:
        form: The way of comparing entries.
        rounds: How often stages are chosen again.
    """

    form: Form
    rounds: int = 2

    def codes(self, wanted: jax.Array, tables: jax.Array, squares: jax.Array) -> jax.Array:
        """See `CodeChoice`; vectors are independent, so their weights do not matter."""
        del squares
        stages = tables.shape[0]
        if stages == 1:
            return nearest_in_chunk(wanted, tables[0], form=self.form)[None]

        def step(
            number: jax.Array, state: tuple[jax.Array, jax.Array, jax.Array]
        ) -> tuple[jax.Array, jax.Array, jax.Array]:
            codes, parts, left = state
            stage = number % stages
            target = left + parts[stage]
            chosen = nearest_in_chunk(target, tables[stage], form=self.form)
            new = tables[stage][chosen].T
            return codes.at[stage].set(chosen), parts.at[stage].set(new), target - new

        start = (
            jnp.zeros((stages, wanted.shape[1]), jnp.int32),
            jnp.zeros((stages, *wanted.shape)),
            wanted,
        )
        codes, _, _ = jax.lax.fori_loop(0, stages * (1 + self.rounds), step, start)
        return codes

    def shared(self, losses: jax.Array) -> jax.Array:
        """See `CodeChoice`."""
        return losses


@dataclass(frozen=True)
class TrellisChoice:
    """The best closed trellis runs of neighbouring columns; codes are windows.

    Attributes:
        bits: New bits per weight.
        tree: Whether to search by a tree of (min, +) products instead of Viterbi steps.
    """

    bits: int
    tree: bool = False

    def codes(self, wanted: jax.Array, tables: jax.Array, squares: jax.Array) -> jax.Array:
        """See `CodeChoice`; the columns of a run share bits, so their weights matter."""
        run = run_length(wanted.shape[1])
        runs = wanted.reshape(-1, run)
        search = search_closed_runs if self.tree else search_runs
        windows = search(runs, squares.reshape(-1, run), tables.reshape(-1), bits=self.bits)
        return windows.reshape(1, -1)

    def shared(self, losses: jax.Array) -> jax.Array:
        """See `CodeChoice`."""
        runs = losses.reshape(-1, run_length(losses.shape[0]))
        return jnp.broadcast_to(runs.sum(1, keepdims=True), runs.shape).reshape(-1)


def choice_for(format: VQFormat) -> CodeChoice:
    """Return the choice of codes for a format on this machine."""
    if not format.trellis:
        return NearestChoice(form_for(format.length, format.entries))
    # A CPU gains nothing from many at once.
    many = jax.default_backend() != "cpu" and format.entries >> format.trellis <= MOST_STATES
    return TrellisChoice(format.trellis, tree=many)


def choose_all(
    rows: jax.Array, counts: jax.Array, squares: jax.Array, tables: jax.Array, *, choice: CodeChoice
) -> jax.Array:
    """Choose codes (stages, blocks, out) of (in, out) rows, each block independently.

    Args:
        rows: float32, `in` a multiple of length.
        counts: (in,) weights of rows.
        squares: (out,) weights of columns.
        tables: (stages, entries, length).
        choice: How codes are chosen.
    """
    length, width = tables.shape[2], rows.shape[1]

    def block(parts: tuple[jax.Array, jax.Array]) -> jax.Array:
        measure = jnp.sqrt(parts[1])
        return choice.codes(measure[:, None] * parts[0], tables * measure, squares)

    blocks = (rows.reshape(-1, length, width), counts.reshape(-1, length))
    together = None if jax.default_backend() == "cpu" else _TOGETHER
    return jax.lax.map(block, blocks, batch_size=together).swapaxes(0, 1)


def decode_rows(codes: jax.Array, tables: jax.Array) -> jax.Array:
    """Decode codes (stages, blocks, out) by tables (stages, entries, length) to (in, out)."""
    vectors = jax.vmap(lambda table, code: table[code])(tables, codes).sum(0)
    return vectors.swapaxes(1, 2).reshape(-1, codes.shape[2])

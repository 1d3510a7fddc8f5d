"""Who chooses codes for a block of rows: the nearest entries, or a search through a trellis."""

from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp

from ..codebooks.nearest import Form, form_for, nearest_in_chunk
from ..formats import VQFormat
from .trellis import run_length, search_runs
from .trellis_products import MOST_STATES, search_closed_runs

# Blocks of rows that an accelerator chooses codes for at a time.
_TOGETHER = 32


class CodeChoice(Protocol):
    """Chooses codes; what chooses alike is equal, so that one compiled program serves it."""

    def codes(self, wanted: jax.Array, tables: jax.Array, squares: jax.Array) -> jax.Array:
        """int32 (stages, n) for (length, n) and tables (stages, entries, length).

        `squares` (n,) says how much a vector counts.
        """
        ...

    def shared(self, losses: jax.Array) -> jax.Array:
        """Losses (n,) summed over what is chosen together."""
        ...


@dataclass(frozen=True)
class NearestChoice:
    """The nearest entry: stage by stage, then each stage anew beside the others.

    Attributes:
        form: How entries are compared.
        rounds: How often stages are chosen anew.
    """

    form: Form
    rounds: int = 2

    def codes(self, wanted: jax.Array, tables: jax.Array, squares: jax.Array) -> jax.Array:
        """See `CodeChoice`; vectors do not compete, so it does not matter how much they count."""
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
            found = nearest_in_chunk(target, tables[stage], form=self.form)
            new = tables[stage][found].T
            return codes.at[stage].set(found), parts.at[stage].set(new), target - new

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
    """The best closed runs of neighbouring columns; codes are windows.

    Attributes:
        bits: New bits of each weight.
        tree: Whether by products of costs instead of steps; see `trellis_products`.
    """

    bits: int
    tree: bool = False

    def codes(self, wanted: jax.Array, tables: jax.Array, squares: jax.Array) -> jax.Array:
        """See `CodeChoice`; the columns of a run compete by how much they count."""
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
    """Who chooses the codes of a format on this machine."""
    if not format.trellis:
        return NearestChoice(form_for(format.length, format.entries))
    # A CPU gains nothing from many at once.
    many = jax.default_backend() != "cpu" and format.entries >> format.trellis <= MOST_STATES
    return TrellisChoice(format.trellis, tree=many)


def choose_all(
    rows: jax.Array, counts: jax.Array, squares: jax.Array, tables: jax.Array, *, choice: CodeChoice
) -> jax.Array:
    """Codes (stages, blocks, out) of (in, out) rows, each block for itself.

    Args:
        rows: float32, `in` a multiple of length.
        counts: (in,): how much a row counts.
        squares: (out,): how much a column counts.
        tables: (stages, entries, length).
        choice: Who chooses codes.
    """
    length, width = tables.shape[2], rows.shape[1]

    def block(parts: tuple[jax.Array, jax.Array]) -> jax.Array:
        measure = jnp.sqrt(parts[1])
        return choice.codes(measure[:, None] * parts[0], tables * measure, squares)

    blocks = (rows.reshape(-1, length, width), counts.reshape(-1, length))
    together = None if jax.default_backend() == "cpu" else _TOGETHER
    return jax.lax.map(block, blocks, batch_size=together).swapaxes(0, 1)


def decode_rows(codes: jax.Array, tables: jax.Array) -> jax.Array:
    """(in, out) of codes (stages, blocks, out) and tables (stages, entries, length)."""
    found = jax.vmap(lambda table, code: table[code])(tables, codes).sum(0)
    return found.swapaxes(1, 2).reshape(-1, codes.shape[2])

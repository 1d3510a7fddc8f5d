"""Who chooses codes for a block of rows: the nearest entries, or a search through a trellis."""

from dataclasses import dataclass
from typing import Protocol

import jax
import jax.numpy as jnp

from .nearest import Form, nearest_in_chunk
from .trellis import run_length, search_runs


class Choice(Protocol):
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
        """See `Choice`; vectors do not compete, so it does not matter how much they count."""
        del squares
        codes: list[jax.Array] = []
        parts: list[jax.Array] = []
        left = wanted
        for table in tables:
            codes.append(nearest_in_chunk(left, table, form=self.form))
            parts.append(table[codes[-1]].T)
            left = left - parts[-1]
        for _ in range(self.rounds if len(codes) > 1 else 0):
            for stage, table in enumerate(tables):
                codes[stage] = nearest_in_chunk(left + parts[stage], table, form=self.form)
                new = table[codes[stage]].T
                left, parts[stage] = left + parts[stage] - new, new
        return jnp.stack(codes)

    def shared(self, losses: jax.Array) -> jax.Array:
        """See `Choice`."""
        return losses


@dataclass(frozen=True)
class TrellisChoice:
    """The best closed runs of neighbouring columns; codes are windows.

    Attributes:
        bits: New bits of each weight.
    """

    bits: int

    def codes(self, wanted: jax.Array, tables: jax.Array, squares: jax.Array) -> jax.Array:
        """See `Choice`; the columns of a run compete by how much they count."""
        run = run_length(wanted.shape[1])
        runs = wanted.reshape(-1, run)
        windows = search_runs(runs, squares.reshape(-1, run), tables.reshape(-1), bits=self.bits)
        return windows.reshape(1, -1)

    def shared(self, losses: jax.Array) -> jax.Array:
        """See `Choice`."""
        runs = losses.reshape(-1, run_length(losses.shape[0]))
        return jnp.broadcast_to(runs.sum(1, keepdims=True), runs.shape).reshape(-1)


def decode_rows(codes: jax.Array, tables: jax.Array) -> jax.Array:
    """(in, out) of codes (stages, blocks, out) and tables (stages, entries, length)."""
    found = jax.vmap(lambda table, code: table[code])(tables, codes).sum(0)
    return found.swapaxes(1, 2).reshape(-1, codes.shape[2])

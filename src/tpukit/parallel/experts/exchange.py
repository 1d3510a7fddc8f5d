"""Send a different number of rows to every device of a mesh axis, and return them."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax


class Exchange(NamedTuple):
    """Row counts between the devices of an axis: `sizes[i, j]` rows go from i to j."""

    sizes: Array  # (devices, devices) int32
    axis: str
    rows: int  # a device's own rows, the most it sends to any one device

    @property
    def devices(self) -> int:
        """Devices along the axis."""
        return self.sizes.shape[0]

    @property
    def rows_received(self) -> int:
        """The size of a receive buffer, for the case that every device sends all its rows here."""
        return self.devices * self.rows

    def send(self, rows: Array) -> Array:
        """Send (rows, d), ordered by destination; receive (rows_received, d), ordered by source.

        Only the first `sizes[:, here].sum()` received rows are used; the rest are zero.
        """
        return _ragged_all_to_all(rows, self.sizes, self.rows_received, self.rows, self.axis)

    def send_back(self, rows: Array) -> Array:
        """Undo `send`: every row returns to the place it came from."""
        return _ragged_all_to_all(rows, self.sizes.T, self.rows, self.rows, self.axis)


def _ragged_all_to_all(
    rows: Array, sizes: Array, rows_out: int, most_to_one: int, axis: str
) -> Array:
    here = lax.axis_index(axis)
    to_each = sizes[here]
    from_each = sizes[:, here]
    send_starts = _starts(to_each)
    receive_starts = _starts(from_each)
    # Where this device's rows begin in each destination's buffer: after all earlier sources.
    starts_there = _starts(sizes)[here]

    def ragged(rows: Array) -> Array:
        buffer = jnp.zeros_like(rows, shape=(rows_out, rows.shape[-1]))
        return lax.ragged_all_to_all(
            rows, buffer, send_starts, to_each, starts_there, from_each, axis_name=axis
        )

    def padded(rows: Array) -> Array:
        # XLA:CPU has no ragged all-to-all, so equal blocks of the largest possible size are sent.
        within = jnp.arange(most_to_one)
        source = send_starts[:, None] + within
        source = jnp.where(within < to_each[:, None], source, rows.shape[0])
        blocks = rows.at[source].get(mode="fill", fill_value=0)
        blocks = lax.all_to_all(blocks, axis, split_axis=0, concat_axis=0)
        row = jnp.arange(rows_out)
        sender = jnp.minimum(segment_of_row(from_each, rows_out), sizes.shape[0] - 1)
        flat = sender * most_to_one + row - receive_starts[sender]
        flat = jnp.where(row < from_each.sum(), flat, sizes.shape[0] * most_to_one)
        return blocks.reshape(-1, rows.shape[-1]).at[flat].get(mode="fill", fill_value=0)

    return lax.platform_dependent(rows, cpu=padded, default=ragged)


def segment_of_row(sizes: Array, rows: int) -> Array:
    """Return the segment number of each row, for consecutive segments of `sizes`."""
    ends = jnp.cumsum(sizes)
    return jnp.cumsum(jnp.zeros_like(ends, shape=rows).at[ends].add(1, mode="drop"))


def _starts(sizes: Array) -> Array:
    return jnp.cumsum(sizes, axis=0) - sizes

"""k-means passes over many vectors: nearest entries, and weighted sums per entry.

Vectors are stored as (rounds, devices, length, chunk): a device compares one chunk per round. They
are shuffled once, and a pass uses the first N of them. So one compiled program serves passes of
every size, and several devices use the same vectors as one device.
"""

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ...kernels.partition.sharded_call import sharded_call
from .nearest import Form, chunk_for, form_for, nearest_in_chunk

_AXIS = "data"
# k-means++ compares every vector of its sample with every entry, one entry after the other.
_SAMPLE_PER_ENTRY, _LEAST_SAMPLE, _MOST_SAMPLE = 16, 4096, 65_536
_MOST_PLUS_PLUS = 4096
_ROW = 128
_DRAWN_TOGETHER = 16


class Sums(NamedTuple):
    """Sums that a pass returns.

    Attributes:
        total: (entries, length) weighted sums of the vectors of each entry.
        mass: (entries, length or 1) sums of their weights.
        error: The weighted sum of squared errors.
        weight: The sum of the weights of all values.
    """

    total: jax.Array
    mass: jax.Array
    error: jax.Array
    weight: jax.Array


@dataclass(frozen=True)
class Points:
    """Shuffled vectors in the layout of a pass.

    Attributes:
        values: float32 (rounds, devices, length, chunk).
        weights: (rounds, devices, length or 1, chunk), or None for equal weights.
        count: Number of vectors; the rest is padding.
        form: The way of comparing vectors with entries.
        mesh: The mesh they are sharded over; None for one device.
    """

    values: jax.Array
    weights: jax.Array | None
    count: int
    form: Form
    mesh: Mesh | None

    @property
    def per_value(self) -> bool:
        """Whether each value of a vector has its own weight."""
        return self.weights is not None and self.weights.shape[2] > 1

    def sums(self, table: jax.Array, most: int, bound: jax.Array | None) -> Sums:
        """Return the sums of a pass over the first `most` vectors."""
        made = _pass(self.mesh, self.form)
        return made(self.values, self.weights, table, min(most, self.count), bound)

    def first(self, most: int) -> tuple[jax.Array, jax.Array | None]:
        """Return the first `most` vectors as (n, length), and their weights."""
        return self._rows(self.values, most), (
            None if self.weights is None else self._rows(self.weights, most)
        )

    def _rows(self, array: jax.Array, most: int) -> jax.Array:
        rounds = -(-min(most, self.count) // (array.shape[1] * array.shape[3]))
        rows = array[:rounds].swapaxes(2, 3).reshape(-1, array.shape[2])
        return rows[: min(most, self.count)]


def lay_out(
    vectors: jax.Array, weights: jax.Array | None, *, entries: int, seed: int, mesh: Mesh | None
) -> Points:
    """Shuffle vectors (n, length) and weights (n, length or 1), and lay them out for passes."""
    count, length = vectors.shape
    order = np.random.default_rng(seed).permutation(count)
    devices = 1 if mesh is None else mesh.size
    if mesh is not None:
        mesh = Mesh(mesh.devices.reshape(-1), (_AXIS,))
    platform = None if mesh is None else mesh.devices.flat[0].platform
    form = form_for(length, entries, platform, -(-count // devices))
    chunk = chunk_for(form, -(-count // devices))
    rounds = -(-count // (chunk * devices))

    def cut(array: jax.Array) -> jax.Array:
        made = _chunks(array, order, rounds=rounds, devices=devices, chunk=chunk)
        return made if mesh is None else jax.device_put(made, _sharding(mesh))

    return Points(cut(vectors), None if weights is None else cut(weights), count, form, mesh)


@partial(jax.jit, static_argnames=("rounds", "devices", "chunk"))
def _chunks(
    array: jax.Array, order: jax.Array, *, rounds: int, devices: int, chunk: int
) -> jax.Array:
    missing = rounds * devices * chunk - array.shape[0]
    rows = jnp.pad(array[order], ((0, missing), (0, 0)))
    return rows.reshape(rounds, devices, chunk, -1).swapaxes(2, 3)


def _sharding(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(None, _AXIS))


@lru_cache(maxsize=64)
def _pass(mesh: Mesh | None, form: Form):  # noqa: ANN202 — a jitted function has no plain type
    if mesh is None:
        return jax.jit(partial(sums_of_chunks, form=form, axis=None))
    split = PartitionSpec(None, _AXIS)
    mapped = sharded_call(
        partial(sums_of_chunks, form=form, axis=_AXIS),
        mesh,
        in_specs=(split, split, PartitionSpec(), PartitionSpec(), PartitionSpec()),
        out_specs=PartitionSpec(),
    )
    return jax.jit(mapped)


def sums_of_chunks(
    values: jax.Array,
    weights: jax.Array | None,
    table: jax.Array,
    most: jax.Array | int,
    bound: jax.Array | None,
    *,
    form: Form,
    axis: str | None,
) -> Sums:
    """Return the sums of one device's chunks, added up over all devices."""
    _, _, length, chunk = values.shape
    size = table.shape[0]
    devices = 1 if axis is None else jax.lax.axis_size(axis)
    device = 0 if axis is None else jax.lax.axis_index(axis)
    wide = weights is not None and weights.shape[2] > 1
    columns = length if wide else 1

    def one(step: jax.Array, carried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        sums, squares = carried
        vectors = values[step, 0]
        own = jnp.ones((1, chunk)) if weights is None else weights[step, 0]
        number = (step * devices + device) * chunk + jnp.arange(chunk)
        own = jnp.where(number < most, own, 0)
        codes = nearest_in_chunk(vectors, table, own if wide else None, form=form, bound=bound)
        rows = jnp.concatenate([vectors * own, jnp.broadcast_to(own, (columns, chunk))]).T
        # In chunks of their own first: a float32 that counts to millions loses the last vectors.
        return (
            sums + jax.ops.segment_sum(rows, codes, size),
            squares + (own * vectors * vectors).sum(),
        )

    rounds = (most + chunk * devices - 1) // (chunk * devices)
    start = (jnp.zeros((size, length + columns)), jnp.float32(0))
    sums, squares = jax.lax.fori_loop(0, rounds, one, start)
    if axis is not None:
        sums, squares = jax.lax.psum((sums, squares), axis)
    total, mass = sums[:, :length], sums[:, length:]
    # Σ w·(x − c)² from the sums: no vector is looked at twice.
    error = squares - 2 * (total * table).sum() + (mass * table * table).sum()
    weight = mass.sum() * (length // columns)
    return Sums(total, mass, jnp.maximum(error, 0), weight)


@partial(jax.jit, static_argnames=("entries", "together"))
def plus_plus(
    vectors: jax.Array, mass: jax.Array, key: jax.Array, *, entries: int, together: int = 1
) -> jax.Array:
    """Draw entries from (n, length) by k-means++: the farther from earlier entries, the likelier.

    `together` entries are drawn per step, each from its own range of the cumulative probability, so
    that no two are equal. A GPU takes as long for sixteen as for one.
    """
    count = vectors.shape[0] // _ROW * _ROW
    columns, mass = vectors[:count].T, mass[:count]

    def draw(distance: jax.Array, at: jax.Array) -> jax.Array:
        rows = distance.reshape(-1, _ROW)
        steps = jnp.cumsum(rows.sum(1))
        sought = at * steps[-1]
        row = jnp.minimum((steps < sought[:, None]).sum(1), rows.shape[0] - 1)
        before = jnp.where(row > 0, steps[row - 1], 0)
        lane = (jnp.cumsum(rows[row], axis=1) < (sought - before)[:, None]).sum(1)
        return row * _ROW + jnp.minimum(lane, _ROW - 1)

    def add(distance: jax.Array, at: jax.Array) -> tuple[jax.Array, jax.Array]:
        chosen = columns[:, draw(distance, at)]
        new = mass * ((columns[:, None] - chosen[:, :, None]) ** 2).sum(0).min(0)
        return jnp.minimum(distance, new), chosen.T

    far = jnp.where(mass > 0, jnp.finfo(jnp.float32).max / count, 0)
    steps = -(-entries // together)
    places = (jax.random.uniform(key, (steps, together)) + jnp.arange(together)) / together
    return jax.lax.scan(add, far, places)[1].reshape(-1, vectors.shape[1])[:entries]


def first_entries(points: Points, entries: int, seed: int) -> jax.Array:
    """Return initial entries (entries, length): by k-means++ on a sample, or the first vectors."""
    if entries > _MOST_PLUS_PLUS or points.count < max(entries, _ROW):
        return points.first(entries)[0]
    vectors, weights = points.first(sample_size(entries))
    mass = jnp.ones(vectors.shape[0]) if weights is None else weights.mean(1)
    together = drawn_together(points.form)
    return plus_plus(vectors, mass, jax.random.key(seed), entries=entries, together=together)


def sample_size(entries: int) -> int:
    """Return the number of vectors in the sample of k-means++."""
    return max(entries, min(max(_LEAST_SAMPLE, _SAMPLE_PER_ENTRY * entries), _MOST_SAMPLE))


def drawn_together(form: Form) -> int:
    """Return how many entries k-means++ draws per step: one on a CPU."""
    return 1 if form == "loop" else _DRAWN_TOGETHER

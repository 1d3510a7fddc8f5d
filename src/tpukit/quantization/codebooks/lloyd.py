"""Passes of k-means over many vectors: which entry is theirs, and the sums by entry.

Vectors lie as (rounds, devices, length, chunk): a device compares one chunk a round. A pass looks
at the first so many of them, in an order that was shuffled once, so one compiled program makes
passes of every size, and several devices look at the same vectors as one does.
"""

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from .nearest import Form, chunk_for, form_for, nearest_in_chunk

_AXIS = "data"
# k-means++ compares every vector of its sample with every entry, one entry after the other.
_SAMPLE_PER_ENTRY, _LEAST_SAMPLE, _MOST_SAMPLE = 16, 4096, 65_536
_MOST_PLUS_PLUS = 4096
_ROW = 128
_DRAWN_TOGETHER = 16


class Sums(NamedTuple):
    """What a pass finds.

    Attributes:
        total: (entries, length) weighted sums of the vectors of each entry.
        mass: (entries, length or 1) sums of their weights.
        error: The weighted sum of squared errors.
        weight: The sum of weights, of values.
    """

    total: jax.Array
    mass: jax.Array
    error: jax.Array
    weight: jax.Array


@dataclass(frozen=True)
class Points:
    """Shuffled vectors, laid out for passes.

    Attributes:
        values: float32 (rounds, devices, length, chunk).
        weights: (rounds, devices, length or 1, chunk), or None where all count alike.
        count: Vectors; what lies past them is padding.
        form: How they are compared.
        mesh: Where they lie, or None for one device.
    """

    values: jax.Array
    weights: jax.Array | None
    count: int
    form: Form
    mesh: Mesh | None

    @property
    def per_value(self) -> bool:
        """Whether values of a vector have weights of their own."""
        return self.weights is not None and self.weights.shape[2] > 1

    def sums(self, table: jax.Array, most: int, bound: jax.Array | None) -> Sums:
        """One pass over the first `most` vectors."""
        made = _pass(self.mesh, self.form)
        return made(self.values, self.weights, table, min(most, self.count), bound)

    def first(self, most: int) -> tuple[jax.Array, jax.Array | None]:
        """The first `most` vectors as (n, length), and their weights as they were given."""
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
    """Shuffle vectors (n, length) and weights (n, length or 1) and cut them for passes."""
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
    mapped = jax.shard_map(
        partial(sums_of_chunks, form=form, axis=_AXIS),
        mesh=mesh,
        in_specs=(split, split, PartitionSpec(), PartitionSpec(), PartitionSpec()),
        out_specs=PartitionSpec(),
        check_vma=False,
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
    """The sums of one device's chunks, added up over all devices."""
    _, _, length, chunk = values.shape
    size = table.shape[0]
    devices = 1 if axis is None else jax.lax.axis_size(axis)
    device = 0 if axis is None else jax.lax.axis_index(axis)
    wide = weights is not None and weights.shape[2] > 1
    columns = length if wide else 1

    def one(step: jax.Array, carried: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        found, squares = carried
        vectors = values[step, 0]
        own = jnp.ones((1, chunk)) if weights is None else weights[step, 0]
        number = (step * devices + device) * chunk + jnp.arange(chunk)
        own = jnp.where(number < most, own, 0)
        codes = nearest_in_chunk(vectors, table, own if wide else None, form=form, bound=bound)
        rows = jnp.concatenate([vectors * own, jnp.broadcast_to(own, (columns, chunk))]).T
        # In chunks of their own first: a float32 that counts to millions loses the last vectors.
        return (
            found + jax.ops.segment_sum(rows, codes, size),
            squares + (own * vectors * vectors).sum(),
        )

    rounds = (most + chunk * devices - 1) // (chunk * devices)
    start = (jnp.zeros((size, length + columns)), jnp.float32(0))
    found, squares = jax.lax.fori_loop(0, rounds, one, start)
    if axis is not None:
        found, squares = jax.lax.psum((found, squares), axis)
    total, mass = found[:, :length], found[:, length:]
    # Σ w·(x − c)² from the sums: no vector is looked at twice.
    error = squares - 2 * (total * table).sum() + (mass * table * table).sum()
    weight = mass.sum() * (length // columns)
    return Sums(total, mass, jnp.maximum(error, 0), weight)


@partial(jax.jit, static_argnames=("entries", "together"))
def plus_plus(
    vectors: jax.Array, mass: jax.Array, key: jax.Array, *, entries: int, together: int = 1
) -> jax.Array:
    """k-means++: entries drawn from (n, length), each as likely as it is far from those before.

    `together` of them are drawn in a step, each from a share of the chances of its own, so that no
    two are the same: a GPU takes as long for sixteen as for one.
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
    """(entries, length) to begin with: by k-means++ on a sample, or the first of very many."""
    if entries > _MOST_PLUS_PLUS or points.count < max(entries, _ROW):
        return points.first(entries)[0]
    vectors, weights = points.first(sample_size(entries))
    mass = jnp.ones(vectors.shape[0]) if weights is None else weights.mean(1)
    together = drawn_together(points.form)
    return plus_plus(vectors, mass, jax.random.key(seed), entries=entries, together=together)


def sample_size(entries: int) -> int:
    """How many vectors k-means++ looks at."""
    return max(entries, min(max(_LEAST_SAMPLE, _SAMPLE_PER_ENTRY * entries), _MOST_SAMPLE))


def drawn_together(form: Form) -> int:
    """Entries that k-means++ draws in a step: one on a CPU, where steps cost what they compute."""
    return 1 if form == "loop" else _DRAWN_TOGETHER

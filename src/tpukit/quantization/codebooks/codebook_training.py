"""`train_codebook`: k-means of vectors, with weights, a seed and a report."""

import math
import time
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import ArrayLike

from ...runtime.progress import Counted, Progress, silent
from .codebook import Codebook, FitReport, Metric, parse_metric, round_entries
from .lloyd import Points, Sums, first_entries, lay_out
from .nearest import nearest
from .vectors import check_sizes, cut_vectors, cut_weights

# Of all passes, the share that looks at `batch` vectors, and the share at the mean of that and all.
_EARLY, _MIDDLE = 0.1, 0.1
# Entries go so much further than to the mean of their vectors, which takes fewer passes to the same
# error; below 2 the error of no pass can grow.
_STRIDE = 1.9


def train_codebook(
    data: ArrayLike,
    *,
    entries: int = 256,
    length: int = 4,
    iterations: int = 25,
    batch: int = 65_536,
    metric: str = "euclidean",
    weights: ArrayLike | None = None,
    seed: int = 0,
    tolerance: float = 3e-4,
    dtype: Literal["int8", "float32"] = "int8",
    mesh: Mesh | None = None,
    progress: Progress = silent,
) -> Codebook:
    """Fit a codebook to vectors by k-means.

    It begins with k-means++ on a sample. The first tenth of the passes looks at `batch` vectors,
    the next at more, the rest at all. An entry that no vector chooses moves to a vector with a
    large error.

    Args:
        data: (n, length), or anything whose values can be cut into vectors of `length`.
        entries: How many to fit, 2 … 65 536.
        length: Values of a vector.
        iterations: Passes, at most.
        batch: Vectors that early passes look at.
        metric: "euclidean"; "cosine" for directions, to which a gain is stored with every code; or
            "dot" for the largest products, with entries no longer than vectors are on average. Only
            the first follows the error of a matrix product.
        weights: (n,) of vectors or (n, length) of values, by which squared errors count.
        seed: The same seed, data and machine give the same codebook.
        tolerance: It stops when a pass over all vectors lowers the error by less, relatively.
        dtype: "int8" rounds entries to what a file and the kernel hold; "float32" does not.
        mesh: Devices among which vectors are divided; None is one device.
        progress: Called with a line for each pass.

    Raises:
        TPUValidationError: Sizes, weights or the metric are not valid, or values are not finite.
    """
    start = time.perf_counter()
    known = parse_metric(metric)
    check_sizes(entries=entries, length=length, iterations=iterations, batch=batch)
    vectors = cut_vectors(data, length, entries)
    each = None if weights is None else cut_weights(weights, vectors)
    vectors, middle, bound, notes = _for_metric(vectors, known, length)
    points = lay_out(vectors, each, entries=entries, seed=seed, mesh=mesh)
    table = _tame(first_entries(points, entries, seed), known, bound)
    stages = _stages(iterations, min(batch, points.count), points.count)
    stride = _STRIDE if known == "euclidean" else 1.0
    history: list[float] = []
    respawned, converged, place, last = 0, False, 0, 0
    random = np.random.default_rng(seed)
    for done in range(1, iterations + 1):
        while place + 1 < len(stages) and done > stages[place][0]:
            place += 1
        size = stages[place][1]
        found = points.sums(table, size, bound)
        reach = stride if done < iterations else 1.0
        table, lost, unused = _moved(table, found, reach, bound, metric=known)
        error, empty = float(lost), np.flatnonzero(unused)
        change = 1.0 if not history else 1 - error / max(history[-1], 1e-30)
        same, last = size == last, size
        history.append(error)
        progress(Counted(f"pass {done}: error {error:.5g}", done=done, total=iterations))
        if empty.size and done < iterations:
            table = _respawn(points, table, empty, min(size, batch), random)
            table = _tame(table, known, bound)
            respawned += empty.size
        if same and 0 <= change < tolerance and not empty.size:
            if size == points.count:
                converged = True
                break
            place += 1
    values = table + middle
    report = FitReport(
        history=tuple(history),
        error=history[-1],
        vectors=points.count,
        iterations=len(history),
        converged=converged,
        respawned=respawned,
        seconds=time.perf_counter() - start,
        notes=notes,
    )
    if dtype == "float32":
        return Codebook(values[None], jnp.float32(1), known, report)
    rounded, scale = round_entries(values[None])
    return Codebook(rounded, scale, known, report)


@partial(jax.jit, static_argnames="metric")
def _moved(
    table: jax.Array, found: Sums, reach: float, bound: jax.Array | None, *, metric: Metric
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Entries after a pass, its mean error, and which entries no vector chose."""
    means = found.total / jnp.maximum(found.mass, 1e-30)
    moved = jnp.where(found.mass > 0, table + reach * (means - table), table)
    return _tame(moved, metric, bound), found.error / found.weight, found.mass.sum(1) == 0


def _stages(iterations: int, least: int, most: int) -> list[tuple[int, int]]:
    """Up to which pass, and over how many vectors."""
    early = round(_EARLY * iterations)
    middle = early + round(_MIDDLE * iterations)
    sizes = [(early, least), (middle, round(math.sqrt(least * most))), (iterations, most)]
    return sizes if least < most else sizes[-1:]


def _for_metric(
    vectors: jax.Array, metric: Metric, length: int
) -> tuple[jax.Array, jax.Array, jax.Array | None, tuple[str, ...]]:
    """Vectors as k-means sees them, what is added to entries again, the bound, and notes."""
    if metric == "euclidean":
        # Around zero: squares of values far from it would take the digits that errors need.
        middle = vectors.mean(0)
        return vectors - middle, middle, None, ()
    norms = jnp.sqrt((vectors**2).sum(1, keepdims=True))
    nowhere = jnp.zeros(length)
    if metric == "cosine":
        unit = vectors / jnp.where(norms == 0, 1, norms)
        note = (
            f"A gain of 16 bits goes with every vector: {16 / length:g} bits more a value. Errors "
            "are those of unit vectors."
        )
        return unit, nowhere, None, (note,)
    bound = jnp.sqrt((norms**2).mean())
    note = f"No entry is longer than the vectors' root mean square, {float(bound):.4g}."
    return vectors, nowhere, bound, (note,)


def _tame(table: jax.Array, metric: Metric, bound: jax.Array | None) -> jax.Array:
    """Entries as the metric allows them: unit vectors, or within the bound."""
    if metric == "euclidean":
        return table
    norms = jnp.maximum(jnp.sqrt((table**2).sum(1, keepdims=True)), 1e-30)
    if bound is None:
        return table / norms
    return table * jnp.minimum(1, bound / norms)


def _respawn(
    points: Points, table: jax.Array, empty: np.ndarray, most: int, random: np.random.Generator
) -> jax.Array:
    """Put entries that nobody chose onto vectors drawn by their weighted squared errors."""
    vectors, weights = points.first(most)
    wide = weights if points.per_value else None
    lost = (vectors - table[nearest(vectors, table, wide)]) ** 2
    each = np.asarray((lost if weights is None else lost * weights).sum(1), np.float64)
    candidates = np.flatnonzero(each > 0)
    count = min(empty.size, candidates.size)
    if not count:
        return table
    chances = each[candidates] / each[candidates].sum()
    chosen = random.choice(candidates, count, replace=False, p=chances)
    return table.at[empty[:count]].set(vectors[chosen])

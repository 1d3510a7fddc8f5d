"""Fit a codebook to vectors by k-means."""

import math
import time
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import ArrayLike

from ...errors import TPUValidationError
from ...runtime.progress import Counted, Progress, silent
from ..formats import MOST_ENTRIES
from .codebook import Codebook, FitReport, Metric, parse_metric, round_entries
from .lloyd import Points, Sums, first_entries, lay_out
from .nearest import nearest


def check_sizes(**sizes: object) -> None:
    """Check that every size is a whole number within its range.

    Raises:
        TPUValidationError: A size is out of range.
    """
    for name, size in sizes.items():
        least, most = (2, MOST_ENTRIES) if name == "entries" else (1, 2**40)
        if isinstance(size, bool) or not isinstance(size, int) or not least <= size <= most:
            raise TPUValidationError(
                f"{name}={size!r}; expected a whole number from {least} to {most}."
            )


def cut_vectors(data: ArrayLike, length: int, entries: int) -> jax.Array:
    """Return data as float32 vectors (n, length).

    Raises:
        TPUValidationError: The length does not divide the data, values are not finite, or there are
            fewer vectors than entries.
    """
    values = jnp.asarray(data, jnp.float32)
    if values.size % length or (values.ndim == 2 and values.shape[1] % length):
        raise TPUValidationError(
            f"Data of shape {values.shape} cannot be cut into vectors of {length}; choose a length "
            "that divides its last axis, or pad it."
        )
    vectors = values.reshape(-1, length)
    if vectors.shape[0] < entries:
        raise TPUValidationError(
            f"{vectors.shape[0]} vectors of {length} values cannot fit {entries} entries; give "
            f"more data, or at most entries={vectors.shape[0]}."
        )
    if not bool(_all_finite(vectors)):
        raise TPUValidationError("Data holds values that are not finite; remove them.")
    return vectors


def cut_weights(weights: ArrayLike, vectors: jax.Array) -> jax.Array:
    """Return weights of vectors as float32 (n, 1) or (n, length).

    Raises:
        TPUValidationError: The weights have another shape, are negative, or all zero.
    """
    each = jnp.asarray(weights, jnp.float32)
    if each.shape not in ((vectors.shape[0],), (vectors.shape[0], 1), vectors.shape):
        raise TPUValidationError(
            f"weights are {each.shape}; expected {(vectors.shape[0],)} of vectors or "
            f"{vectors.shape} of values."
        )
    if not bool(_all_finite(each) & _all_counted(each)):
        raise TPUValidationError("weights must be finite, not negative, and not all zero.")
    return each.reshape(vectors.shape[0], -1)


@jax.jit
def _all_finite(values: jax.Array) -> jax.Array:
    return jnp.isfinite(values).all()


@jax.jit
def _all_counted(weights: jax.Array) -> jax.Array:
    return (weights >= 0).all() & (weights > 0).any()


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

    It starts with k-means++ on a sample. The first tenth of the passes uses `batch` vectors, the
    next passes use more, the rest use all. An entry that no vector chooses moves to a vector with
    a large error.

    Args:
        data: (n, length), or an array that can be reshaped to vectors of `length`.
        entries: Number of entries, 2 … 65 536.
        length: Values of a vector.
        iterations: Largest number of passes.
        batch: Vectors that early passes use.
        metric: "euclidean"; "cosine" for directions, with a gain per code; or "dot" for the largest
            dot products, with entries no longer than vectors are on average. Only "euclidean"
            follows the error of a matmul.
        weights: Factors of squared errors, (n,) per vector or (n, length) per value.
        seed: The same seed, data and machine give the same codebook.
        tolerance: Training stops when a pass over all vectors lowers the error by less than this
            share.
        dtype: "int8" rounds entries as files and kernels store them; "float32" does not.
        mesh: Devices over which vectors are sharded; None for one device.
        progress: Called with one line per pass.

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
        sums = points.sums(table, size, bound)
        reach = stride if done < iterations else 1.0
        table, lost, unused = _moved(table, sums, reach, bound, metric=known)
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
    table: jax.Array, sums: Sums, reach: float, bound: jax.Array | None, *, metric: Metric
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return entries after a pass, its mean error, and a mask of entries that no vector chose."""
    means = sums.total / jnp.maximum(sums.mass, 1e-30)
    moved = jnp.where(sums.mass > 0, table + reach * (means - table), table)
    return _tame(moved, metric, bound), sums.error / sums.weight, sums.mass.sum(1) == 0


def _stages(iterations: int, least: int, most: int) -> list[tuple[int, int]]:
    """Return (last pass, number of vectors) of each stage of the training."""
    early = round(_EARLY * iterations)
    middle = early + round(_MIDDLE * iterations)
    sizes = [(early, least), (middle, round(math.sqrt(least * most))), (iterations, most)]
    return sizes if least < most else sizes[-1:]


def _for_metric(
    vectors: jax.Array, metric: Metric, length: int
) -> tuple[jax.Array, jax.Array, jax.Array | None, tuple[str, ...]]:
    """Return vectors for k-means, the offset of entries, the bound on entries, and notes."""
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
    """Project entries to unit vectors for cosine, or to the bound for dot products."""
    if metric == "euclidean":
        return table
    norms = jnp.maximum(jnp.sqrt((table**2).sum(1, keepdims=True)), 1e-30)
    if bound is None:
        return table / norms
    return table * jnp.minimum(1, bound / norms)


def _respawn(
    points: Points, table: jax.Array, empty: np.ndarray, most: int, random: np.random.Generator
) -> jax.Array:
    """Move entries that no vector chose to vectors drawn by their weighted squared errors."""
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

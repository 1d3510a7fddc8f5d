"""`train_codebook`: k-means of vectors, with weights, a seed and a report."""

import time
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ..errors import TPUValidationError
from ..runtime.progress import Counted, Progress, silent
from .codebook import Codebook, FitReport, parse_metric, round_entries
from .nearest import nearest


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
    progress: Progress = silent,
) -> Codebook:
    """Fit a codebook to vectors by k-means.

    Args:
        data: (n, length), or anything that is cut into vectors of `length`.
        entries: How many to fit.
        length: Values of a vector.
        iterations: Passes, at most.
        batch: Vectors that early passes look at.
        metric: "euclidean", "cosine" or "dot".
        weights: (n,) of vectors or (n, length) of values, by which squared errors count.
        seed: The same seed, data and machine give the same codebook.
        progress: Called with a line for each pass.
    """
    start = time.perf_counter()
    known = parse_metric(metric)
    vectors = jnp.asarray(data, jnp.float32).reshape(-1, length)
    if vectors.shape[0] < entries:
        raise TPUValidationError(f"{vectors.shape[0]} vectors cannot fit {entries} entries.")
    each = None if weights is None else jnp.asarray(weights, jnp.float32)
    if each is not None and each.ndim == 1:
        each = jnp.broadcast_to(each[:, None], vectors.shape)
    key = jax.random.key(seed)
    table = vectors[jax.random.choice(key, vectors.shape[0], (entries,), replace=False)]
    history: list[float] = []
    for done in range(1, iterations + 1):
        table, error = _lloyd(vectors, table, each)
        history.append(float(error))
        progress(Counted(f"pass {done}: error {error:.5g}", done=done, total=iterations))
    rounded, scale = round_entries(table[None])
    fit = FitReport(
        history=tuple(history),
        error=history[-1] if history else None,
        vectors=vectors.shape[0],
        iterations=len(history),
        seconds=time.perf_counter() - start,
    )
    return Codebook(rounded, scale, known, fit)


@partial(jax.jit)
def _lloyd(
    vectors: jax.Array, table: jax.Array, weights: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    codes = nearest(vectors, table, weights)
    each = jnp.ones_like(vectors) if weights is None else weights
    error = (each * (vectors - table[codes]) ** 2).sum() / each.sum()
    total = jax.ops.segment_sum(each * vectors, codes, table.shape[0])
    mass = jax.ops.segment_sum(each, codes, table.shape[0])
    return jnp.where(mass > 0, total / jnp.maximum(mass, 1e-30), table), error

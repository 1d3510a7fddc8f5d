"""`quantize_matrix`: fit a `VQArray` to a weight by the error of its layer's output.

The steps, each of which lowers the output error: normalise columns, k-means weighted by the inputs,
error feedback, then refine entries and codes in turn; entries are int8 at the end. All of it is one
compiled program for matrices of one shape, which an accelerator runs in parallel.
"""

from collections.abc import Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ...errors import TPUValidationError
from ..codebooks.codebook import Metric, parse_metric
from ..codebooks.codebook_training import train_codebook
from ..codebooks.nearest import nearest
from ..formats import VQFormat, parse_vq_format
from .choice import choice_for
from .matrix_fit import Fit, fit_program, sampled, weighed_vectors
from .trellis import gaussian_table
from .vq_array import VQArray, random_signs, rotate

# Weights that are quantized side by side: what is at work takes some ten times their float32.
_MOST_TOGETHER = 2**26


def quantize_matrix(
    weight: ArrayLike,
    *,
    format: str | float | VQFormat = "vq2",
    hessian: ArrayLike | None = None,
    seed: int = 0,
    feedback: bool = True,
    refit: bool = True,
    hadamard: bool = False,
    metric: str = "euclidean",
    forced: bool = False,
) -> VQArray:
    """Quantize an (in, out) matrix whose columns are output channels.

    Args:
        weight: The matrix.
        format: A name ("vq2", "trellis2"), bits per weight (1.75, 2, 3.5, 4) or a `VQFormat`.
        hessian: (in, in): XᵀX of the layer's inputs at any scale; None weighs all inputs equally.
        seed: Seed of codebook and rotation.
        feedback: Whether later rows compensate errors of earlier rows.
        refit: Whether entries, codes and scales are refined for the output error.
        hadamard: Whether rows are rotated first, which spreads outliers over all rows.
        metric: Metric of the first codebook. Only "euclidean" follows the error of a matmul, so
            "cosine" and "dot" are refused unless forced.
        forced: Accept another metric.

    Raises:
        TPUValidationError: The format is unknown, or a shape or value is not valid.
    """
    made = quantize_matrices(
        [weight],
        [hessian],
        format=format,
        seed=seed,
        feedback=feedback,
        refit=refit,
        hadamard=hadamard,
        metric=metric,
        forced=forced,
    )
    return made[0]


def quantize_matrices(
    weights: Sequence[ArrayLike],
    hessians: Sequence[ArrayLike | None],
    *,
    format: str | float | VQFormat = "vq2",
    seed: int = 0,
    feedback: bool = True,
    refit: bool = True,
    hadamard: bool = False,
    metric: str = "euclidean",
    forced: bool = False,
) -> list[VQArray]:
    """Quantize matrices of one shape, in parallel on an accelerator.

    Args:
        weights: (in, out) each.
        hessians: One per matrix, or None.
        format: See `quantize_matrix`, also for the other arguments.
        seed: Seed of codebooks and rotation.
        feedback: As there.
        refit: As there.
        hadamard: As there.
        metric: As there.
        forced: As there.
    """
    chosen = parse_vq_format(format)
    cells = check_weight_metric(metric, forced=forced)
    given = [_checked(one, own) for one, own in zip(weights, hessians, strict=True)]
    height, width = given[0][0].shape
    signs = random_signs(height, seed) if hadamard else None
    if signs is not None:
        given = [
            (rotate(matrix, signs), rotate(rotate(inputs, signs), signs, axis=1))
            for matrix, inputs in given
        ]
    # A CPU gains nothing from many at once, and loses its caches.
    alone = jax.default_backend() == "cpu"
    tables: list[jax.Array] | None = None
    if chosen.trellis:
        window = (chosen.entries - 1).bit_length()
        table = jnp.asarray(gaussian_table(chosen.trellis, window)).reshape(1, -1, 1)
        tables = [table] * len(given)
    elif cells != "euclidean":
        tables = [
            _tables_of_metric(*matrix, chosen, feedback=feedback, seed=seed, metric=cells)
            for matrix in given
        ]
    how = Fit(chosen, feedback, refit, choice_for(chosen), tables is not None)
    size = 1 if alone else max(1, _MOST_TOGETHER // (height * width))
    key = jax.random.key(seed)
    made: list[VQArray] = []
    for start in range(0, len(given), size):
        some = given[start : start + size]
        own = None if tables is None else jnp.stack(tables[start : start + size])
        matrices, inputs = (jnp.stack(arrays) for arrays in zip(*some, strict=True))
        made += _unstacked(
            fit_program(how, side_by_side=not alone)(matrices, inputs, own, key), len(some)
        )
    return [replace(array, signs=signs) for array in made]


def _unstacked(stacked: VQArray, count: int) -> list[VQArray]:
    def take(number: int) -> VQArray:
        return jax.tree.map(lambda leaf: leaf[number], stacked)

    return [take(number) for number in range(count)]


def _checked(weight: ArrayLike, hessian: ArrayLike | None) -> tuple[jax.Array, jax.Array]:
    """Return the weight and H in float32, H scaled to a mean diagonal of 1."""
    matrix = jnp.asarray(weight, jnp.float32)
    if matrix.ndim != 2 or not matrix.size:
        raise TPUValidationError(
            f"The weight is {matrix.shape}; expected (in, out), both at least 1. Quantize "
            "the matrices of a stack one by one."
        )
    height = matrix.shape[0]
    inputs = jnp.eye(height) if hessian is None else jnp.asarray(hessian, jnp.float32)
    if inputs.shape != (height, height):
        raise TPUValidationError(
            f"The Hessian is {inputs.shape} for a weight {matrix.shape}; expected "
            f"{(height, height)}, XᵀX of the layer's inputs."
        )
    if not bool(jnp.isfinite(matrix).all() & jnp.isfinite(inputs).all()):
        raise TPUValidationError("Weight or Hessian hold values that are not finite.")
    mean = float(jnp.mean(jnp.diag(inputs)))
    if mean <= 0:
        raise TPUValidationError(
            "The Hessian's diagonal is not positive: no input reached this layer in calibration. "
            "Give inputs that do, or hessian=None."
        )
    return matrix, inputs / mean


def check_weight_metric(name: str, *, forced: bool = False) -> Metric:
    """Return the metric of a name, and check that it suits weights.

    Raises:
        TPUValidationError: The metric is unknown, or does not follow the error of a matmul.
    """
    metric = parse_metric(name)
    if metric != "euclidean" and not forced:
        raise TPUValidationError(
            f"metric={name!r} does not follow the error of a matmul; it is for embeddings, "
            "keys and retrieval. Use 'euclidean' for weights, or pass forced=True."
        )
    return metric


def _tables_of_metric(
    matrix: jax.Array,
    inputs: jax.Array,
    format: VQFormat,
    *,
    feedback: bool,
    seed: int,
    metric: Metric,
) -> jax.Array:
    """Fit tables (stages, entries, length) with vectors assigned by "cosine" or "dot"."""
    how = Fit(format, feedback, False, choice_for(format), True)
    every = weighed_vectors(matrix, inputs, how)
    vectors, weights = sampled(*every, jax.random.key(seed), format.entries)
    tables: list[jax.Array] = []
    for stage in range(format.stages):
        book = train_codebook(
            vectors,
            entries=format.entries,
            length=format.length,
            weights=weights,
            metric=metric,
            seed=seed + stage,
            dtype="float32",
        )
        tables.append(_means(vectors, weights, book.values[0]))
        vectors = vectors - tables[-1][nearest(vectors, tables[-1], weights)]
    return jnp.stack(tables)


def _means(vectors: jax.Array, weights: jax.Array, table: jax.Array) -> jax.Array:
    """Return weighted means of the vectors of each entry, assigned by largest dot product."""
    codes = jnp.argmax(vectors @ table.T, axis=1)
    total = jax.ops.segment_sum(weights * vectors, codes, table.shape[0])
    mass = jax.ops.segment_sum(weights, codes, table.shape[0])
    return jnp.where(mass > 0, total / jnp.where(mass > 0, mass, 1), 0)


def output_error(
    weight: ArrayLike, quantized: VQArray | jax.Array, hessian: ArrayLike | None = None
) -> float:
    """Return the relative error of a layer's output, tr(ΔᵀHΔ) / tr(WᵀHW); zeros have 1.

    Args:
        weight: The float (in, out) matrix.
        quantized: The quantized matrix.
        hessian: (in, in): XᵀX of the layer's inputs; None weighs all inputs equally.
    """
    exact, inputs = _checked(weight, hessian)
    matrix = quantized.dequantize() if isinstance(quantized, VQArray) else quantized
    lost = exact - matrix.astype(jnp.float32)
    size = float((exact * (inputs @ exact)).sum())
    return float((lost * (inputs @ lost)).sum()) / size if size else float((lost**2).sum())

"""`quantize_matrix`: a float weight as a `VQArray`, judged by the output of its layer.

The ladder, each rung of which lowers the output error: columns normalised, k-means weighted by the
inputs, error feedback, then entries and codes refined in turn; entries in int8 at the end. All of
it is one compiled program for matrices of one shape, which an accelerator runs side by side.
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
from .first_tables import sampled
from .matrix_fit import Fit, fit_program, weighed_vectors
from .rotation import random_signs, rotate
from .trellis import gaussian_table
from .vq_array import VQArray

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
        format: A name ("vq2", "trellis2"), bits a weight (1.75, 2, 3.5, 4) or a `VQFormat`.
        hessian: (in, in): XᵀX of the layer's inputs, of any scale; None weighs all inputs alike.
        seed: Of codebook and rotation.
        feedback: Whether what was lost in rows done is made good in rows to come.
        refit: Whether entries, codes and scales are fitted to the output error in turn once codes
            are chosen.
        hadamard: Whether rows are rotated first, which spreads outliers.
        metric: By which the first codebook's cells are made. Only "euclidean" follows the error of
            a product, so "cosine" and "dot" are refused unless forced.
        forced: Take such a metric all the same.

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
    """Quantize matrices of one shape, side by side on an accelerator.

    Args:
        weights: (in, out) each.
        hessians: One for each, or None.
        format: See `quantize_matrix`, as all others.
        seed: Of codebooks and rotation.
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
            _tables_of_metric(*one, chosen, feedback=feedback, seed=seed, metric=cells)
            for one in given
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
    return [replace(one, signs=signs) for one in made]


def _unstacked(stacked: VQArray, count: int) -> list[VQArray]:
    def take(number: int) -> VQArray:
        return jax.tree.map(lambda leaf: leaf[number], stacked)

    return [take(number) for number in range(count)]


def _checked(weight: ArrayLike, hessian: ArrayLike | None) -> tuple[jax.Array, jax.Array]:
    """The weight and H in float32, H with a mean of 1 on its diagonal."""
    matrix = jnp.asarray(weight, jnp.float32)
    if matrix.ndim != 2 or not matrix.size:
        raise TPUValidationError(
            f"The weight is {matrix.shape}; expected (in, out) with at least one of each. Stack "
            "matrices of more axes one by one."
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
    """The metric of a name, for weights that are multiplied.

    Raises:
        TPUValidationError: There is none, or it does not follow the error of a product.
    """
    metric = parse_metric(name)
    if metric != "euclidean" and not forced:
        raise TPUValidationError(
            f"metric={name!r} does not follow the error of a matrix product: it is for embeddings, "
            "keys and retrieval. Take 'euclidean' for weights, or pass forced=True."
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
    """float32 (stages, entries, length): cells by another metric, entries by their means."""
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
    """The weighted means of vectors by the entry with the largest product: weights have no gain."""
    codes = jnp.argmax(vectors @ table.T, axis=1)
    total = jax.ops.segment_sum(weights * vectors, codes, table.shape[0])
    mass = jax.ops.segment_sum(weights, codes, table.shape[0])
    return jnp.where(mass > 0, total / jnp.where(mass > 0, mass, 1), 0)


def output_error(
    weight: ArrayLike, quantized: VQArray | jax.Array, hessian: ArrayLike | None = None
) -> float:
    """The relative error of a layer's output, tr(ΔᵀHΔ) / tr(WᵀHW); 1 is as bad as no weight.

    Args:
        weight: The float (in, out) matrix.
        quantized: What stands for it.
        hessian: (in, in): XᵀX of the layer's inputs; None takes all inputs alike.
    """
    exact, inputs = _checked(weight, hessian)
    found = quantized.dequantize() if isinstance(quantized, VQArray) else quantized
    lost = exact - found.astype(jnp.float32)
    size = float((exact * (inputs @ exact)).sum())
    return float((lost * (inputs @ lost)).sum()) / size if size else float((lost**2).sum())

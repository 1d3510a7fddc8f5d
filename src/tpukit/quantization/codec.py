"""`quantize_matrix`: a float weight as a `VQArray`, judged by the output of its layer.

The ladder, each rung of which lowers the output error: columns normalised, k-means weighted by the
inputs, error feedback, then entries and codes refined in turn; entries in int8 at the end.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ..errors import TPUValidationError
from .choice import Choice, NearestChoice, TrellisChoice, decode_rows
from .codebook import Metric, code_dtype, parse_metric, round_entries
from .codebook_training import train_codebook
from .feedback import inverse_factor, quantize_with_feedback
from .formats import VQFormat, parse_vq_format
from .nearest import form_for, nearest
from .refinement import refit_entries, refit_scales, sweep_codes
from .rotation import random_signs, rotate
from .trellis import gaussian_table, pack_bits, padded_width
from .vq_array import VQArray

DAMPING = 0.01
"""Share of the mean of its diagonal that is added to H: inputs nobody saw still count."""
_SAMPLE_PER_ENTRY, _LEAST_SAMPLE = 256, 65_536
_REFINEMENTS = 2


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
    chosen = parse_vq_format(format)
    cells = check_weight_metric(metric, forced=forced)
    matrix, inputs = _checked(weight, hessian)
    height, width = matrix.shape
    signs = random_signs(height, seed) if hadamard else None
    if signs is not None:
        matrix = rotate(matrix, signs)
        inputs = rotate(rotate(inputs, signs), signs, axis=1)
    wide = padded_width(width) if chosen.trellis else width
    rows, scales, squares, inputs = _normalised(matrix, inputs, length=chosen.length, wide=wide)
    factor = inverse_factor(inputs) if feedback else None
    # With feedback, a row's error counts as far as no later row makes it good.
    counts = jnp.diag(inputs) if factor is None else 1 / jnp.diag(factor) ** 2
    if chosen.trellis:
        choice: Choice = TrellisChoice(chosen.trellis)
        window = (chosen.entries - 1).bit_length()
        tables = jnp.asarray(gaussian_table(chosen.trellis, window)).reshape(1, -1, 1)
    else:
        choice = NearestChoice(form_for(chosen.length, chosen.entries))
        tables = _first_tables(rows, counts, squares, chosen, seed, cells)
    if factor is None:
        codes = _choose_all(rows, counts, squares, tables, choice=choice)
    else:
        codes = quantize_with_feedback(rows, factor, squares, tables, choice=choice)
    if refit:
        for _ in range(_REFINEMENTS):
            tables = refit_entries(rows, inputs, squares, codes, tables)
            codes = sweep_codes(rows, inputs, squares, codes, tables, choice=choice)
        tables = refit_entries(rows, inputs, squares, codes, tables)
    entries, scale = round_entries(tables)
    tables = entries.astype(jnp.float32) * scale
    if refit:
        codes = sweep_codes(rows, inputs, squares, codes, tables, choice=choice)
        scales = scales * refit_scales(rows, inputs, decode_rows(codes, tables))
    if chosen.trellis:
        codes = pack_bits(codes & (2**chosen.trellis - 1), chosen.trellis)
    return VQArray(
        codes.astype(code_dtype(chosen.entries) if not chosen.trellis else jnp.uint8),
        entries,
        (scales * scale)[:width].astype(jnp.bfloat16),
        signs,
        (height, width),
        chosen.layout,
    )


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


@partial(jax.jit, static_argnames=("length", "wide"))
def _normalised(
    matrix: jax.Array, inputs: jax.Array, *, length: int, wide: int
) -> tuple[jax.Array, ...]:
    """Rows filled up and divided by the norms of columns, those norms, their weights, damped H."""
    height, width = matrix.shape
    missing = -height % length
    padded = jnp.pad(matrix, ((0, missing), (0, wide - width)))
    # Rows that are not there count a little, so that H can be inverted.
    floor = DAMPING * jnp.mean(jnp.diag(inputs))
    damped = jnp.pad(inputs, (0, missing)) + floor * jnp.eye(height + missing)
    scales = jnp.sqrt(jnp.mean(padded**2, axis=0))
    scales = jnp.where(scales == 0, 1.0, scales)
    # How much a column counts; none that is padding does.
    squares = jnp.where(jnp.arange(wide) < width, scales**2, 0)
    return padded / scales, scales, squares / squares.mean(), damped


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


def _first_tables(
    rows: jax.Array,
    counts: jax.Array,
    squares: jax.Array,
    format: VQFormat,
    seed: int,
    metric: Metric,
) -> jax.Array:
    """float32 (stages, entries, length) by weighted k-means, each stage on what is left."""
    vectors = _vectors(rows, format.length)
    weights = _vectors(counts[:, None] * squares, format.length)
    most = max(_LEAST_SAMPLE, _SAMPLE_PER_ENTRY * format.entries)
    if vectors.shape[0] > most:
        order = jax.random.permutation(jax.random.key(seed), vectors.shape[0])[:most]
        vectors, weights = vectors[order], weights[order]
    if vectors.shape[0] <= format.entries:  # each is its own entry, and nothing is left
        missing = format.entries - vectors.shape[0]
        return jnp.pad(vectors[None], ((0, format.stages - 1), (0, missing), (0, 0)))
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
        table = book.values[0]
        tables.append(table if metric == "euclidean" else _means(vectors, weights, table))
        vectors = vectors - tables[-1][nearest(vectors, tables[-1], weights)]
    return jnp.stack(tables)


def _means(vectors: jax.Array, weights: jax.Array, table: jax.Array) -> jax.Array:
    """The weighted means of vectors by the entry with the largest product: weights have no gain."""
    codes = jnp.argmax(vectors @ table.T, axis=1)
    total = jax.ops.segment_sum(weights * vectors, codes, table.shape[0])
    mass = jax.ops.segment_sum(weights, codes, table.shape[0])
    return jnp.where(mass > 0, total / jnp.where(mass > 0, mass, 1), 0)


def _vectors(rows: jax.Array, length: int) -> jax.Array:
    """(blocks · out, length) of (in, out)."""
    return rows.reshape(-1, length, rows.shape[1]).swapaxes(1, 2).reshape(-1, length)


@partial(jax.jit, static_argnames="choice")
def _choose_all(
    rows: jax.Array, counts: jax.Array, squares: jax.Array, tables: jax.Array, *, choice: Choice
) -> jax.Array:
    """Codes (stages, blocks, out), each block for itself, weighted by the inputs."""
    length, width = tables.shape[2], rows.shape[1]

    def block(parts: tuple[jax.Array, jax.Array]) -> jax.Array:
        measure = jnp.sqrt(parts[1])
        return choice.codes(measure[:, None] * parts[0], tables * measure, squares)

    blocks = (rows.reshape(-1, length, width), counts.reshape(-1, length))
    return jax.lax.map(block, blocks).swapaxes(0, 1)


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

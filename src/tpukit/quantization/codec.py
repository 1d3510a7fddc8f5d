"""`quantize_matrix`: a float weight as a `VQArray`, judged by the output of its layer."""

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from ..errors import TPUValidationError
from .codebook import code_dtype, round_entries
from .codebook_training import train_codebook
from .formats import VQFormat, parse_vq_format
from .nearest import nearest
from .rotation import random_signs, rotate
from .vq_array import VQArray


def quantize_matrix(
    weight: ArrayLike,
    *,
    format: str | float | VQFormat = "vq2",
    hessian: ArrayLike | None = None,
    seed: int = 0,
    feedback: bool = True,
    refit: bool = True,
    hadamard: bool = False,
) -> VQArray:
    """Quantize an (in, out) matrix whose columns are output channels.

    Args:
        weight: The matrix.
        format: A name ("vq2"), bits a weight (1.75, 2, 3.5, 4) or a `VQFormat`.
        hessian: (in, in): XᵀX of the layer's inputs, of any scale; None weighs all inputs alike.
        seed: Of codebook and rotation.
        feedback: Whether what was lost in rows done is made good in rows to come.
        refit: Whether entries are fitted to the output error once codes are chosen.
        hadamard: Whether rows are rotated first, which spreads outliers.
    """
    chosen = parse_vq_format(format)
    matrix = jnp.asarray(weight, jnp.float32)
    if matrix.ndim != 2 or not matrix.size:
        raise TPUValidationError(f"The weight is {matrix.shape}; expected (in, out).")
    height, width = matrix.shape
    signs = random_signs(height, seed) if hadamard else None
    if signs is not None:
        matrix = rotate(matrix, signs)
    norms = jnp.sqrt(jnp.mean(matrix**2, axis=0))
    norms = jnp.where(norms == 0, 1.0, norms)
    rows = jnp.pad(matrix / norms, ((0, -height % chosen.length), (0, 0)))
    vectors = rows.reshape(-1, chosen.length, width).swapaxes(1, 2).reshape(-1, chosen.length)
    tables: list[jax.Array] = []
    codes: list[jax.Array] = []
    for stage in range(chosen.stages):
        book = train_codebook(
            vectors, entries=chosen.entries, length=chosen.length, seed=seed + stage
        )
        found = nearest(vectors, book.values[0])
        vectors = vectors - book.values[0][found]
        tables.append(book.values[0])
        codes.append(found.reshape(-1, width))
    entries, scale = round_entries(jnp.stack(tables))
    return VQArray(
        jnp.stack(codes).astype(code_dtype(chosen.entries)),
        entries,
        norms * scale,
        signs,
        (height, width),
        chosen.layout,
    )


def output_error(
    weight: ArrayLike, quantized: VQArray | jax.Array, hessian: ArrayLike | None = None
) -> float:
    """The relative error of a layer's output, tr(ΔᵀHΔ) / tr(WᵀHW); 1 is as bad as no weight.

    Args:
        weight: The float (in, out) matrix.
        quantized: What stands for it.
        hessian: (in, in): XᵀX of the layer's inputs; None takes all inputs alike.
    """
    exact = jnp.asarray(weight, jnp.float32)
    found = quantized.dequantize() if isinstance(quantized, VQArray) else quantized
    lost = exact - found.astype(jnp.float32)
    if hessian is None:
        return float((lost**2).sum() / (exact**2).sum())
    inputs = jnp.asarray(hessian, jnp.float32)
    return float((lost * (inputs @ lost)).sum() / (exact * (inputs @ exact)).sum())

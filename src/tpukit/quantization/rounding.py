"""Matrices in one format, whatever format that is."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..models.stored.part import Part
from .integers.qwix_matrices import Method, quantize_integers
from .plan import INTEGERS
from .vector_codes.codec import quantize_matrices


def round_matrix(
    weight: jax.Array,
    format: str,
    *,
    hessian: jax.Array | None,
    integers: Method | None = None,
    seed: int = 0,
    codec: dict[str, Any] | None = None,
) -> Part:
    """An (inputs, outputs) matrix in a format of a `QuantPlan`.

    Args:
        weight: The matrix.
        format: Its name; "bf16" rounds to bfloat16.
        hessian: XᵀX of its inputs, or None.
        integers: How integers are rounded; by default "gptq" for int4 where there is a hessian,
            and "nearest" for eight bits, where it changes next to nothing.
        seed: Of codebooks.
        codec: Further arguments of `quantize_matrix`.
    """
    made = round_matrices(
        [weight], format, hessians=[hessian], integers=integers, seed=seed, codec=codec
    )
    return made[0]


def round_matrices(
    weights: Sequence[jax.Array],
    format: str,
    *,
    hessians: Sequence[jax.Array | None],
    integers: Method | None = None,
    seed: int = 0,
    codec: dict[str, Any] | None = None,
) -> list[Part]:
    """Matrices of one shape in one format; see `round_matrix`."""
    if format == "bf16":
        return [weight.astype(jnp.bfloat16) for weight in weights]
    if format not in INTEGERS:
        made = quantize_matrices(weights, hessians, format=format, seed=seed, **(codec or {}))
        return [*made]
    found: list[Part] = []
    for weight, hessian in zip(weights, hessians, strict=True):
        default: Method = "gptq" if format == "int4" and hessian is not None else "nearest"
        method = integers or default
        if format == "fp8" and method == "gptq":
            method = "nearest"
        found.append(quantize_integers(weight, format, hessian=hessian, method=method))
    return found

"""One matrix in one format, whatever format that is."""

from typing import Any

import jax
import jax.numpy as jnp

from ..models.stored.parameter import Part
from .codec import quantize_matrix
from .plan import INTEGERS
from .qwix_matrices import Method, quantize_integers


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
    if format == "bf16":
        return weight.astype(jnp.bfloat16)
    if format in INTEGERS:
        default: Method = "gptq" if format == "int4" and hessian is not None else "nearest"
        method = integers or default
        if format == "fp8" and method == "gptq":
            method = "nearest"
        return quantize_integers(weight, format, hessian=hessian, method=method)
    return quantize_matrix(weight, format=format, hessian=hessian, seed=seed, **(codec or {}))

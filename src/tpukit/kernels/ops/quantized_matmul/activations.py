"""What multiplies a quantized weight: bfloat16, or rows rounded to int8 as they come."""

from typing import Literal, TypeAlias, get_args

import jax

from ....errors import TPUKernelError, did_you_mean
from ....hardware.formats import INT8
from ...rounding import quantize

Activations: TypeAlias = Literal["bfloat16", "int8"]


def quantize_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """int8 values of (M, K) and float32 (M, 1) scales, by each row's largest magnitude."""
    return quantize(x, INT8, axis=-1)


def check_activations(activations: str, format: str) -> None:
    """Raise where nothing multiplies weights of `format` with such activations.

    Raises:
        TPUKernelError: An unknown name, or int8 with fp8 weights.
    """
    known = get_args(Activations)
    if activations not in known:
        raise TPUKernelError(
            f"activations={activations!r} are unknown; known are {', '.join(known)}."
            + did_you_mean(activations, known)
        )
    if activations == "int8" and format == "fp8":
        raise TPUKernelError(
            "fp8 weights are not integers, so int8 activations cannot multiply them; use "
            "activations='bfloat16', or weights in int8, int4 or vq."
        )

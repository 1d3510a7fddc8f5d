"""What multiplies a quantized weight: bfloat16, or rows rounded to int8 as they come."""

from typing import Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp

from ...errors import TPUKernelError, did_you_mean

Activations: TypeAlias = Literal["bfloat16", "int8"]


def quantize_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """int8 values of (M, K) and float32 (M, 1) scales, by each row's largest magnitude."""
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    largest = jnp.max(jnp.abs(wide), axis=-1, keepdims=True)
    scales = jnp.where(largest == 0, 1, largest / 127)
    return jnp.round(wide / scales).astype(jnp.int8), scales.astype(jnp.float32)


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

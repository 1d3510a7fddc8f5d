"""Matrix products in eight-bit floats: e4m3 forward, e5m2 for gradients, scaled as they come."""

from typing import Any

import jax
import jax.numpy as jnp

from ..errors import TPUModelError
from ..hardware import list_chips
from ..hardware.target import current_target
from ..kernels.precision import has_fp8

# e4m3 holds three bits of fraction, which values need; e5m2 gives one of them for the range that
# gradients need.
FORWARD, BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2
FIRST_GPU = 8.9  # compute capability


@jax.custom_vjp
def float8_matmul(x: jax.Array, matrix: jax.Array) -> jax.Array:
    """`x @ matrix` of x (..., K) and matrix (K, N) of one dtype, both rounded to eight bits.

    Each operand is divided by its largest magnitude of this very step, so nothing overflows and
    nothing is carried between steps; sums are in float32, and the result has that dtype again.
    """
    return _forward(x, matrix)[0]


def _forward(x: jax.Array, matrix: jax.Array) -> tuple[jax.Array, Any]:
    narrow_x, narrow_matrix = _narrow(x, FORWARD), _narrow(matrix, FORWARD)
    y = _dot(narrow_x, narrow_matrix, ((x.ndim - 1,), (0,)))
    return y.astype(x.dtype), (narrow_x, narrow_matrix)


def _backward(kept: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    narrow_x, narrow_matrix = kept
    narrow = _narrow(gradient, BACKWARD)
    leading = tuple(range(gradient.ndim - 1))
    dx = _dot(narrow, narrow_matrix, ((gradient.ndim - 1,), (1,)))
    dmatrix = _dot(narrow_x, narrow, (leading, leading))
    return dx.astype(gradient.dtype), dmatrix.astype(gradient.dtype)


float8_matmul.defvjp(_forward, _backward)


def check_float8() -> str | None:
    """Refuse float8 where what is traced for has no such unit; a note where it is only imitated.

    Raises:
        TPUModelError: Naming the chips that have it.
    """
    chip = current_target()
    able = [one.name for one in list_chips() if has_fp8(one.name)]
    where = f"TPU {' and '.join(able)}, and GPUs of compute capability {FIRST_GPU} or more"
    if chip is not None:
        if not has_fp8(chip):
            raise TPUModelError(
                f"float8 products were asked for and the matrix unit of {chip} has none; {where} "
                "have it. Use bfloat16 here."
            )
        return None
    if jax.default_backend() == "gpu":
        device = jax.devices()[0]
        if float(device.compute_capability) < FIRST_GPU:
            raise TPUModelError(
                f"float8 products were asked for and {device.device_kind} (compute capability "
                f"{device.compute_capability}) has none; {where} have it. Use bfloat16 here."
            )
        return None
    return (
        f"float8 is imitated on {jax.default_backend()}: right numbers, no speed; {where} have it"
    )


def _narrow(values: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Values in eight bits, and what they are to be multiplied with."""
    wide = values.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), initial=0.0)
    scale = jnp.where(largest > 0, largest / float(jnp.finfo(dtype).max), 1.0)
    return (wide / scale).astype(dtype), scale


def _dot(
    left: tuple[jax.Array, jax.Array],
    right: tuple[jax.Array, jax.Array],
    contracting: tuple[tuple[int, ...], tuple[int, ...]],
) -> jax.Array:
    product = jax.lax.dot_general(
        left[0], right[0], (contracting, ((), ())), preferred_element_type=jnp.float32
    )
    return product * (left[1] * right[1])

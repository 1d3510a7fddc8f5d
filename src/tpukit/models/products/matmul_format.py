"""In which format a model's products are made, and where there is a unit for it."""

from collections.abc import Callable
from typing import TypedDict

import jax
import jax.numpy as jnp

from ...errors import TPUModelError
from ...hardware import Chip, get_chip, list_chips
from ...hardware.target import current_target
from ..transformer.config import OPERANDS
from .float8 import float8_matmul
from .float8_static import STATIC_BOUND, float8_channels_matmul, float8_static_matmul
from .int8 import int8_matmul, int8_matmul_throughout

_PRODUCTS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "dtype": jnp.matmul,
    "float8": float8_matmul,
    "float8_channels": float8_channels_matmul,
    "int8": int8_matmul,
    "int8_throughout": int8_matmul_throughout,
}


def product_in(
    matmul: str, x: jax.Array, matrix: jax.Array, *, bound: float = STATIC_BOUND
) -> jax.Array:
    """`x @ matrix` in the format `matmul`, one of those of `TransformerConfig`.

    Args:
        matmul: The format.
        x: Activations (..., K).
        matrix: A weight (K, N).
        bound: The largest magnitude that constant scales keep, for "float8_static".

    Raises:
        TPUModelError: What is traced for has no unit for it.
    """
    check_matmul(matmul)
    if matmul == "float8_static":
        return float8_static_matmul(x, matrix, bound=bound)
    return _PRODUCTS[matmul](x, matrix)


class ExpertsFormat(TypedDict):
    """The arguments of `moe_ffn` that say how experts multiply."""

    float8: bool
    float8_bound: float | None


def experts_format(matmul: str, bound: float) -> ExpertsFormat:
    """How `moe_ffn` multiplies in the format `matmul`.

    Raises:
        TPUModelError: What is traced for has no unit for it.
    """
    check_matmul(matmul)
    return {
        "float8": matmul in ("float8_static", "float8_channels"),
        "float8_bound": bound if matmul == "float8_static" else None,
    }


def check_matmul(matmul: str) -> str | None:
    """Refuse a format where what is traced for has no such unit; a note where it is imitated.

    Raises:
        TPUModelError: Naming the chips that have it.
    """
    operands = OPERANDS.get(matmul)
    if operands is None:
        return None
    chip = current_target()
    able = [one.name for one in list_chips() if one.multiplies(operands)]
    least = operands.first_gpu or 0
    where = f"TPU {', '.join(able)} and GPUs of compute capability {least} or more"
    if chip is not None:
        if not get_chip(chip).multiplies(operands):
            raise TPUModelError(
                f"{matmul} products were asked for and the matrix unit of {chip} has none; {where} "
                f"have it. Use {_instead(get_chip(chip))} here."
            )
        return None
    if jax.default_backend() == "gpu":
        device = jax.devices()[0]
        if float(device.compute_capability) < least:
            raise TPUModelError(
                f"{matmul} products were asked for and {device.device_kind} (compute capability "
                f"{device.compute_capability}) has none; {where} have it. Use bfloat16 here."
            )
        return None
    return (
        f"{matmul} is imitated on {jax.default_backend()}: right numbers, no speed; {where} have it"
    )


def _instead(chip: Chip) -> str:
    narrow = [name for name in ("float8", "int8") if chip.multiplies(name)]
    return " or ".join((*narrow, "bfloat16"))

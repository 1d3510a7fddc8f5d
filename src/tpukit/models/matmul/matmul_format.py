"""The format of a model's matmuls, and the chips whose matrix units support it."""

from collections.abc import Callable
from typing import TypedDict

import jax
import jax.numpy as jnp

from ...errors import TPUModelError
from ...hardware import Chip, get_chip, list_chips
from ...hardware.target import current_target
from ..transformer.config import OPERANDS
from .eight_bit import (
    STATIC_BOUND,
    float8_channels_matmul,
    float8_matmul,
    float8_static_matmul,
    int8_matmul,
    int8_matmul_throughout,
)

_MATMULS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "dtype": jnp.matmul,
    "float8": float8_matmul,
    "float8_channels": float8_channels_matmul,
    "int8": int8_matmul,
    "int8_throughout": int8_matmul_throughout,
}


def matmul_in_format(
    matmul: str, x: jax.Array, matrix: jax.Array, *, bound: float = STATIC_BOUND
) -> jax.Array:
    """Return `x @ matrix` in a format of `TransformerConfig.matmul`.

    Args:
        matmul: The format.
        x: Activations (..., K).
        matrix: A weight (K, N).
        bound: The largest magnitude that is not clipped, for "float8_static".

    Raises:
        TPUModelError: The target chip has no matrix unit for the format.
    """
    check_matmul(matmul)
    if matmul == "float8_static":
        return float8_static_matmul(x, matrix, bound=bound)
    return _MATMULS[matmul](x, matrix)


class ExpertsFormat(TypedDict):
    """The arguments of `moe_ffn` that set the format of the experts' matmuls."""

    float8: bool
    float8_bound: float | None


def experts_format(matmul: str, bound: float) -> ExpertsFormat:
    """Return the arguments of `moe_ffn` for the format `matmul`.

    Raises:
        TPUModelError: The target chip has no matrix unit for the format.
    """
    check_matmul(matmul)
    return {
        "float8": matmul in ("float8_static", "float8_channels"),
        "float8_bound": bound if matmul == "float8_static" else None,
    }


def check_matmul(matmul: str) -> str | None:
    """Return a note where the backend only emulates the format, else None.

    Raises:
        TPUModelError: The target chip has no matrix unit for the format; the message names chips
            that have one.
    """
    operands = OPERANDS.get(matmul)
    if operands is None:
        return None
    chip = current_target()
    able = [known.name for known in list_chips() if known.multiplies(operands)]
    least = operands.first_gpu or 0
    where = f"TPU {', '.join(able)} and GPUs of compute capability {least} or more"
    if chip is not None:
        if not get_chip(chip).multiplies(operands):
            raise TPUModelError(
                f"matmul='{matmul}' is not supported by the matrix unit of {chip}; {where} support "
                f"it. Use {_instead(get_chip(chip))} here."
            )
        return None
    if jax.default_backend() == "gpu":
        device = jax.devices()[0]
        if float(device.compute_capability) < least:
            raise TPUModelError(
                f"matmul='{matmul}' is not supported by {device.device_kind} (compute capability "
                f"{device.compute_capability}); {where} support it. Use bfloat16 here."
            )
        return None
    return (
        f"{matmul} is emulated on {jax.default_backend()}, which is slow but gives the right "
        f"numbers; {where} support it"
    )


def _instead(chip: Chip) -> str:
    narrow = [name for name in ("float8", "int8") if chip.multiplies(name)]
    return " or ".join((*narrow, "bfloat16"))

"""In what precision a matrix product is made, and rounding its operands to eight bits."""

from typing import Literal, TypeAlias, cast, get_args

import jax
import jax.numpy as jnp

from ....errors import TPUKernelError, did_you_mean
from ....hardware import get_chip, list_chips
from ...precision import PrecisionConfig

Mode: TypeAlias = Literal["bfloat16", "mixed", "high", "fp32", "int8", "fp8"]
MODES: tuple[str, ...] = get_args(Mode)
FP8 = jnp.float8_e4m3fn
# The values that rounding makes, and the largest magnitude they hold.
EIGHT_BITS = {"int8": (jnp.int8, 127.0), "fp8": (FP8, 448.0)}


def resolve_mode(precision: str | PrecisionConfig | None, a: jax.Array, b: jax.Array) -> Mode:
    """The mode asked for; with None the one of the operands' own dtype.

    Raises:
        TPUKernelError: No such mode, or integers asked to be floats.
    """
    if jnp.issubdtype(a.dtype, jnp.integer) or jnp.issubdtype(b.dtype, jnp.integer):
        if a.dtype != jnp.int8 or b.dtype != jnp.int8 or precision not in (None, "int8"):
            raise TPUKernelError(
                f"The operands are {a.dtype} and {b.dtype} and precision={precision!r}; integer "
                "products are of int8 with int8, with precision None or 'int8'. Cast them."
            )
        return "int8"
    if precision is None:
        narrow = jnp.promote_types(a.dtype, b.dtype) if a.dtype != b.dtype else a.dtype
        if narrow == jnp.bfloat16:
            return "bfloat16"
        return "fp8" if narrow == FP8 else "fp32"
    if precision == "int8":
        return "int8"
    if isinstance(precision, str) and precision.lower() not in PRECISIONS:
        raise TPUKernelError(
            f"precision={precision!r} is unknown; known are {', '.join(PRECISIONS)}."
            + did_you_mean(precision, PRECISIONS)
        )
    name = PrecisionConfig.parse(precision).name
    if name not in MODES:
        raise TPUKernelError(f"A matrix product has no mode {name!r}; it has {', '.join(MODES)}.")
    return cast(Mode, name)


# What `precision=` may be besides a PrecisionConfig.
PRECISIONS = (*MODES, "bf16", "default", "highest", "float32")


def check_chip(mode: Mode, chip: str | None) -> None:
    """Refuse eight bits where the matrix unit has none; a chip of None is not known.

    Raises:
        TPUKernelError: Naming the generations that have them, and what this one has.
    """
    if mode == "fp8":
        PrecisionConfig.FP8.check(chip)
    if mode != "int8" or chip is None or get_chip(chip).peak("int8").value is not None:
        return
    able = [other.name for other in list_chips() if other.peak("int8").value is not None]
    own = [kind for kind in ("bf16", "fp8") if get_chip(chip).peak(kind).value is not None]
    raise TPUKernelError(
        f"The matrix unit of {chip} has no int8; {', '.join(able)} have it. {chip} supports "
        f"{', '.join(own)}: use precision='{'fp8' if 'fp8' in own else 'bfloat16'}'."
    )


def round_to(x: jax.Array, mode: str, *, axis: int) -> tuple[jax.Array, jax.Array]:
    """Eight-bit values, and float32 scales by the largest magnitude along `axis`."""
    dtype, most = EIGHT_BITS[mode]
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    largest = jnp.max(jnp.abs(wide), axis=axis, keepdims=True)
    scales = jnp.where(largest == 0, 1, largest / most)
    scaled = wide / scales
    values = jnp.round(scaled) if mode == "int8" else scaled
    return values.astype(dtype), scales.astype(jnp.float32)

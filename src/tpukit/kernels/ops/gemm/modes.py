"""In what precision a matrix product is made, and on which chips."""

from typing import Literal, TypeAlias, cast, get_args

import jax
import jax.numpy as jnp

from ....errors import TPUKernelError, did_you_mean
from ....hardware.formats import FLOAT8_E4M3FN, INT8, NumberFormat, spelled_as
from ...precision import MODES as FLOAT_MODES
from ...precision import PrecisionConfig, check_product

Mode: TypeAlias = Literal["bfloat16", "mixed", "high", "fp32", "int8", "fp8"]
MODES: tuple[str, ...] = get_args(Mode)
# What operands are rounded to.
EIGHT_BITS: dict[str, NumberFormat] = {"int8": INT8, "fp8": FLOAT8_E4M3FN}


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
        return "fp8" if narrow == FLOAT8_E4M3FN.name else "fp32"
    if isinstance(precision, str):
        known = (*FLOAT_MODES, "int8")
        found = spelled_as(precision, known)
        if found is None:
            raise TPUKernelError(
                f"precision={precision!r} is unknown; known are {', '.join(known)}."
                + did_you_mean(precision, known)
            )
        if found == "int8":
            return "int8"
    name = PrecisionConfig.parse(precision).name
    if name not in MODES:
        raise TPUKernelError(f"A matrix product has no mode {name!r}; it has {', '.join(MODES)}.")
    return cast(Mode, name)


def check_chip(mode: Mode, chip: str | None) -> None:
    """Refuse eight bits where the matrix unit has none; a chip of None is not known.

    Raises:
        TPUKernelError: Naming the generations that have them, and what this one has.
    """
    if mode in EIGHT_BITS:
        check_product(EIGHT_BITS[mode], chip)

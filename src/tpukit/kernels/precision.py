"""Precision modes of a kernel: the dtypes of its matmuls and sums, and which chips have them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from ..annotations import PyTree
from ..errors import TPUKernelError, did_you_mean
from ..hardware import get_chip, list_chips
from ..hardware.formats import PEAKS, NumberFormat, parse_format, spelled_as
from ..plain_data import JsonObject
from .rounding import absmax_scales, decode, to_nearest


@dataclass(frozen=True)
class PrecisionConfig:
    """How a kernel computes. The constants are the modes; `parse` finds one by name.

    Attributes:
        name: The mode's name.
        compute_dtype: Dtype that floating-point arguments are cast to.
        accumulation_dtype: Dtype in which matmuls sum.
        result_dtype: Dtype of floating-point results; None keeps that of the first such argument.
        matmul_precision: Passes through the matrix unit for float32: one, three or six.
        values_dtype: Narrower format that arguments are rounded to, with one scale per array.
    """

    name: str
    compute_dtype: str
    accumulation_dtype: str = "float32"
    result_dtype: str | None = None
    matmul_precision: Literal["default", "high", "highest"] = "default"
    values_dtype: str | None = None

    BFLOAT16: ClassVar["PrecisionConfig"]
    MIXED: ClassVar["PrecisionConfig"]
    HIGH: ClassVar["PrecisionConfig"]
    FP32: ClassVar["PrecisionConfig"]
    FP8: ClassVar["PrecisionConfig"]

    @classmethod
    def parse(cls, mode: "str | PrecisionConfig") -> "PrecisionConfig":
        """Return the mode of that name: "bfloat16", "mixed", "high", "fp32" ("highest"), "fp8".

        Every name of a format is accepted.

        Raises:
            TPUKernelError: There is no such mode.
        """
        if isinstance(mode, PrecisionConfig):
            return mode
        name = spelled_as(mode, MODES)
        if name is None:
            raise TPUKernelError(
                f"{mode!r} is not a precision; expected one of {', '.join(MODES)}."
                + did_you_mean(mode.lower(), MODES)
            )
        return MODES[name]

    @property
    def jax_precision(self) -> jax.lax.Precision:
        """The value for `jnp.dot(precision=)`."""
        return jax.lax.Precision(self.matmul_precision)

    def check(self, chip: str | None) -> None:
        """Refuse a mode that the generation's matrix unit lacks; a chip of None is not checked.

        Raises:
            TPUKernelError: With the generations that have it, and the formats that this one has.
        """
        if self.values_dtype is not None:
            check_product(parse_format(self.values_dtype), chip)

    def apply(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> PyTree:
        """Call `function` in this mode; integers and trees of arrays pass through.

        FP8 gives the numbers of FP8: arguments are rounded to float8_e4m3 with a power of two as
        the scale of each array, and multiplied in bfloat16, which represents them exactly.
        Gradients ignore the rounding.
        """
        floats = [leaf for leaf in jax.tree.leaves(arguments) if _is_float(leaf)]
        result_dtype = self.result_dtype or (floats[0].dtype if floats else None)
        cast = jax.tree.map(self._cast, arguments)
        with jax.default_matmul_precision(self.matmul_precision):
            result = function(*cast, **options)
        if result_dtype is None:
            return result
        return jax.tree.map(lambda leaf: _as_float(leaf, result_dtype), result)

    def _cast(self, value: Any) -> Any:
        if not _is_float(value):
            return value
        if self.values_dtype is not None:
            value = _round_to(value, parse_format(self.values_dtype))
        return value.astype(self.compute_dtype)

    def to_dict(self) -> JsonObject:
        """Return the mode's fields by name."""
        return {
            "name": self.name,
            "compute_dtype": self.compute_dtype,
            "accumulation_dtype": self.accumulation_dtype,
            "result_dtype": self.result_dtype,
            "matmul_precision": self.matmul_precision,
            "values_dtype": self.values_dtype,
        }


PrecisionConfig.BFLOAT16 = PrecisionConfig("bfloat16", "bfloat16")
PrecisionConfig.MIXED = PrecisionConfig("mixed", "bfloat16", result_dtype="float32")
PrecisionConfig.HIGH = PrecisionConfig("high", "float32", matmul_precision="high")
PrecisionConfig.FP32 = PrecisionConfig("fp32", "float32", matmul_precision="highest")
PrecisionConfig.FP8 = PrecisionConfig("fp8", "bfloat16", values_dtype="float8_e4m3fn")

MODES = {
    "bfloat16": PrecisionConfig.BFLOAT16,
    "default": PrecisionConfig.BFLOAT16,
    "mixed": PrecisionConfig.MIXED,
    "high": PrecisionConfig.HIGH,
    "highest": PrecisionConfig.FP32,
    "fp32": PrecisionConfig.FP32,
    "fp8": PrecisionConfig.FP8,
}


def check_product(operands: NumberFormat, chip: str | None) -> None:
    """Refuse operands that a generation's matrix unit lacks; a chip of None is not checked.

    Raises:
        TPUKernelError: With the generations that have them, and the formats that this one has.
    """
    if chip is None or get_chip(chip).multiplies(operands):
        return
    able = [other.name for other in list_chips() if other.multiplies(operands)]
    own = [name for name in PEAKS if get_chip(chip).multiplies(name)]
    raise TPUKernelError(
        f"The matrix unit of {chip} has no {operands.peak or operands}; {', '.join(able)} have it. "
        f"{chip} supports {', '.join(own)}: use precision='{'fp8' if 'fp8' in own else 'bf16'}'"
        ", or narrow weights with quantized_matmul."
    )


def _round_to(value: jax.Array, format: NumberFormat) -> jax.Array:
    wide = value.astype(jnp.float32)
    # A power of two, so that the rounded values are exact in bfloat16.
    scale = jnp.exp2(jnp.ceil(jnp.log2(absmax_scales(wide, format))))
    rounded = decode(to_nearest(wide / scale, format), scale)
    return wide + jax.lax.stop_gradient(rounded - wide)


def _is_float(value: Any) -> bool:
    return hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.floating)


def _as_float(value: Any, dtype: Any) -> Any:
    return value.astype(dtype) if _is_float(value) else value

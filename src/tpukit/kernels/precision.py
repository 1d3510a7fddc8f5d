"""Precision modes of a kernel: which dtype multiplies, which adds, and where it is supported."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp

from ..errors import TPUKernelError, did_you_mean
from ..hardware import get_chip, list_chips

FP8_MAX = 448.0  # largest finite float8_e4m3fn


@dataclass(frozen=True)
class PrecisionConfig:
    """How a kernel computes. The constants are the modes; `parse` finds one by name.

    Attributes:
        name: Of the mode.
        compute_dtype: What floating-point arguments are cast to.
        accumulation_dtype: What products are summed in.
        result_dtype: Of floating-point results; None keeps that of the first such argument.
        matmul_precision: Passes through the matrix unit for float32: one, three or six.
        values_dtype: Narrower values that arguments are rounded to, with one scale an array.
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
        """The mode of that name: "bfloat16", "mixed", "high", "fp32" ("highest"), "fp8".

        Raises:
            TPUKernelError: There is no such mode.
        """
        if isinstance(mode, PrecisionConfig):
            return mode
        wanted = mode.lower()
        if wanted not in _NAMES:
            raise TPUKernelError(
                f"{mode!r} is not a precision; expected one of {', '.join(_NAMES)}."
                + did_you_mean(wanted, _NAMES)
            )
        return _NAMES[wanted]

    @property
    def jax_precision(self) -> jax.lax.Precision:
        """For `jnp.dot(precision=)`."""
        return jax.lax.Precision(self.matmul_precision)

    def check(self, chip: str | None) -> None:
        """Refuse a mode that the generation's matrix unit has not; None means not known.

        Raises:
            TPUKernelError: Naming the generations that have it, and what this one has.
        """
        if self.values_dtype is None or chip is None or has_fp8(chip):
            return
        own = [kind for kind in ("bf16", "int8", "int4") if get_chip(chip).peak(kind).value]
        able = [other.name for other in list_chips() if has_fp8(other.name)]
        raise TPUKernelError(
            f"The matrix unit of {chip} has no fp8 (the catalog gives it no fp8 rate above that "
            f"of bf16); {' and '.join(able)} have it. {chip} supports {', '.join(own)}: use "
            "PrecisionConfig.BFLOAT16, or int8 weights with quantized_matmul."
        )

    def apply(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """`function` of the arguments in this mode; integers and trees of arrays pass through.

        FP8 gives the numbers of FP8: arguments are rounded to float8_e4m3 with a power of two
        as the scale of each array, and computed with as bfloat16, which holds them exactly.
        Gradients pass the rounding unchanged.
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
            value = _round_to(value, self.values_dtype)
        return value.astype(self.compute_dtype)

    def to_dict(self) -> dict[str, Any]:
        """The mode's fields by name."""
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

_NAMES = {
    "bfloat16": PrecisionConfig.BFLOAT16,
    "bf16": PrecisionConfig.BFLOAT16,
    "default": PrecisionConfig.BFLOAT16,
    "mixed": PrecisionConfig.MIXED,
    "high": PrecisionConfig.HIGH,
    "highest": PrecisionConfig.FP32,
    "fp32": PrecisionConfig.FP32,
    "float32": PrecisionConfig.FP32,
    "fp8": PrecisionConfig.FP8,
}


def has_fp8(chip: str) -> bool:
    """Whether the catalog gives the chip a higher rate for fp8 than for bf16."""
    fp8, bf16 = (get_chip(chip).peak(kind).value for kind in ("fp8", "bf16"))
    return fp8 is not None and bf16 is not None and fp8 > bf16


def _round_to(value: jax.Array, dtype: str) -> jax.Array:
    wide = value.astype(jnp.float32)
    largest = jnp.max(jnp.abs(wide), initial=0.0)
    # A power of two, so that the rounded values are exact in bfloat16.
    scale = jnp.where(largest > 0, jnp.exp2(jnp.ceil(jnp.log2(largest / FP8_MAX))), 1.0)
    rounded = (wide / scale).astype(dtype).astype(jnp.float32) * scale
    return wide + jax.lax.stop_gradient(rounded - wide)


def _is_float(value: Any) -> bool:
    return hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.floating)


def _as_float(value: Any, dtype: Any) -> Any:
    return value.astype(dtype) if _is_float(value) else value

"""Number formats: bits of a value, the largest one, and every name that people give them.

The one table that kernels, models, the planner, the prediction and job settings read. Which
generation multiplies a format is the catalog's to say: `Chip.multiplies` and `Chip.peak`.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Literal

from ..errors import TPUValidationError, did_you_mean

Kind = Literal["float", "integer", "unsigned", "complex", "boolean"]
PeakName = Literal["bf16", "fp8", "int8", "int4"]
PEAKS: tuple[PeakName, ...] = ("bf16", "fp8", "int8", "int4")


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """One number format.

    Attributes:
        name: As numpy, ml_dtypes and jax spell it.
        hlo: As the compiler spells it.
        bits: Of one stored value; several values of less than eight share a byte.
        largest: The largest finite value; of a complex number, that of each part.
        aliases: What else people write for it.
        peak: Under which name a chip's data sheet gives the rate of its products; None where none
            does.
        first_gpu: The least compute capability of NVIDIA GPUs that multiply it.
    """

    name: str
    hlo: str
    kind: Kind
    bits: int
    largest: float
    aliases: tuple[str, ...] = ()
    peak: PeakName | None = None
    first_gpu: float | None = None

    @property
    def itemsize(self) -> int:
        """Bytes of a value that shares its byte with no other, as numpy counts them."""
        return (self.bits + 7) // 8

    def nbytes(self, count: int) -> int:
        """Bytes of `count` values, packed."""
        return (count * self.bits + 7) // 8

    def __str__(self) -> str:
        return self.name


def _float(
    name: str,
    hlo: str,
    bits: int,
    largest: float,
    *aliases: str,
    peak: PeakName | None = None,
    first_gpu: float | None = None,
) -> NumberFormat:
    return NumberFormat(name, hlo, "float", bits, largest, aliases, peak, first_gpu)


def _signed(
    bits: int, *, peak: PeakName | None = None, first_gpu: float | None = None
) -> NumberFormat:
    largest = 2 ** (bits - 1) - 1
    return NumberFormat(
        f"int{bits}", f"s{bits}", "integer", bits, largest, (f"i{bits}",), peak, first_gpu
    )


def _unsigned(bits: int, *, peak: PeakName | None = None) -> NumberFormat:
    largest = 2**bits - 1
    return NumberFormat(f"uint{bits}", f"u{bits}", "unsigned", bits, largest, (f"ui{bits}",), peak)


FLOAT32 = _float("float32", "f32", 32, (2 - 2**-23) * 2.0**127, "fp32", "single")
BFLOAT16 = _float("bfloat16", "bf16", 16, (2 - 2**-7) * 2.0**127, peak="bf16", first_gpu=8.0)
# Three bits of fraction, for values; two of them and a wider range, for gradients.
FLOAT8_E4M3FN = _float(
    *("float8_e4m3fn", "f8e4m3fn", 8, 448.0, "fp8", "float8", "f8", "e4m3", "fp8_e4m3"),
    peak="fp8",
    first_gpu=8.9,
)
FLOAT8_E5M2 = _float(
    "float8_e5m2", "f8e5m2", 8, 57344.0, "e5m2", "fp8_e5m2", peak="fp8", first_gpu=8.9
)
INT8 = _signed(8, peak="int8", first_gpu=8.0)
UINT8 = _unsigned(8, peak="int8")
INT4 = _signed(4, peak="int4")

FORMATS: tuple[NumberFormat, ...] = (
    _float("float64", "f64", 64, sys.float_info.max, "fp64", "double"),
    FLOAT32,
    _float("float16", "f16", 16, 65504.0, "fp16", "half"),
    BFLOAT16,
    FLOAT8_E4M3FN,
    FLOAT8_E5M2,
    _float("float8_e4m3", "f8e4m3", 8, 240.0, peak="fp8"),
    _float("float8_e4m3fnuz", "f8e4m3fnuz", 8, 240.0, peak="fp8"),
    _float("float8_e4m3b11fnuz", "f8e4m3b11fnuz", 8, 30.0, peak="fp8"),
    _float("float8_e5m2fnuz", "f8e5m2fnuz", 8, 57344.0, peak="fp8"),
    _float("float8_e3m4", "f8e3m4", 8, 15.5, peak="fp8"),
    _float("float8_e8m0fnu", "f8e8m0fnu", 8, 2.0**127, "e8m0"),
    _float("float4_e2m1fn", "f4e2m1fn", 4, 6.0, "fp4", "float4", "f4", "e2m1"),
    _signed(64),
    _signed(32),
    _signed(16),
    INT8,
    INT4,
    _signed(2),
    _unsigned(64),
    _unsigned(32),
    _unsigned(16),
    UINT8,
    _unsigned(4, peak="int4"),
    _unsigned(2),
    NumberFormat("bool", "pred", "boolean", 8, 1),
    NumberFormat("complex64", "c64", "complex", 64, FLOAT32.largest),
    NumberFormat("complex128", "c128", "complex", 128, sys.float_info.max),
)


def parse_format(name: str | NumberFormat) -> NumberFormat:
    """The format of that name: "bfloat16", "bf16", "BF16", "fp8", "s8", "f8e4m3fn".

    Raises:
        TPUValidationError: There is no such format; the message names the nearest.
    """
    if isinstance(name, NumberFormat):
        return name
    found = _find(name)
    if found is None:
        usual = "float32, bfloat16, float16, fp8, int8 and int4"
        near = did_you_mean(name.strip().lower(), _by_spelling()) or f" Usual ones are {usual}."
        raise TPUValidationError(f"{name!r} is no number format.{near}")
    return found


def spelled_as(name: str, allowed: Iterable[str]) -> str | None:
    """Which of `allowed` means what `name` does: "bf16" is "bfloat16" where that is allowed.

    What is allowed may hold words that are no formats; they are found as they stand. None where
    nothing allowed means the same.
    """
    known = {word.lower(): word for word in allowed}
    wanted = name.strip().lower()
    if wanted in known:
        return known[wanted]
    found = _find(wanted)
    same = (word for spelling, word in known.items() if found and _find(spelling) is found)
    return next(same, None)


def _find(name: str) -> NumberFormat | None:
    return _by_spelling().get(name.strip().lower())


@cache
def _by_spelling() -> dict[str, NumberFormat]:
    return {spelling: one for one in FORMATS for spelling in (one.name, one.hlo, *one.aliases)}

"""Number formats: bits per value, largest value, packing, and every name they are known by.

This is the one table that kernels, models, the planner, the prediction and job settings read.
`Chip.multiplies` and `Chip.peak` state which generation multiplies a format natively.
"""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from ..errors import TPUValidationError, did_you_mean

if TYPE_CHECKING:
    from .catalog import Chip

WORD_BITS = 32
Kind = Literal["float", "integer", "unsigned", "complex", "boolean"]
PeakName = Literal["bf16", "fp8", "int8", "int4"]
PEAKS: tuple[PeakName, ...] = ("bf16", "fp8", "int8", "int4")


class StandardArray(Protocol):
    """An array of numpy, jax or another library with the Python array API."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Size of each dimension."""
        ...

    def __array_namespace__(self) -> Any: ...


A = TypeVar("A", bound=StandardArray)


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """One number format.

    Attributes:
        name: Name in numpy, ml_dtypes and jax.
        hlo: Name in the compiler's HLO text.
        bits: Bits per stored value; values of fewer than eight bits share a byte.
        largest: The largest finite value (of each part, for complex numbers).
        aliases: Other names that are accepted.
        peak: Name of its matmul peak in a chip's data sheet; None where data sheets have none.
        first_gpu: The least compute capability of NVIDIA GPUs that multiply it natively.
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
        """Bytes of one unpacked value, as numpy counts them."""
        return (self.bits + 7) // 8

    def nbytes(self, count: int) -> int:
        """Return the bytes of `count` packed values."""
        return (count * self.bits + 7) // 8

    @property
    def container(self) -> str:
        """Name of the dtype of unpacked values: its own, or int8 where numpy has none."""
        if self.kind not in ("integer", "unsigned") or self.bits in (2, 4) or self.bits % 8 == 0:
            return self.name
        return "uint8" if self.kind == "unsigned" else "int8"

    @property
    def values_per_word(self) -> int:
        """Packed values per 32-bit word."""
        return WORD_BITS // self.bits

    def pack(self, values: A) -> A:
        """Pack integers (…, rows, columns) into int32 words (…, rows / values_per_word, columns).

        A word has consecutive rows of a column, the lowest bits first. Numpy and jax arrays both
        work. Bits beyond the format are dropped.
        """
        array = values.__array_namespace__()
        unpacked: Any = values
        per_word = self.values_per_word
        grouped = unpacked.reshape(*values.shape[:-2], -1, per_word, values.shape[-1])
        shifts = self.bits * array.arange(per_word, dtype=array.uint32)[:, None]
        masked = grouped.astype(array.uint32) & (2**self.bits - 1)
        return (masked << shifts).sum(-2, dtype=array.uint32).view(array.int32)

    def unpack(self, words: A) -> A:
        """Return the values that `pack` was given, as int8 or uint8."""
        array = words.__array_namespace__()
        word, value = (array.int32, array.int8)
        if self.kind == "unsigned":
            word, value = (array.uint32, array.uint8)
        top = WORD_BITS - self.bits
        shifts = (top - self.bits * array.arange(self.values_per_word, dtype=word))[:, None]
        # Shift left to drop the other values, then right, which extends the sign of signed words.
        packed: Any = words
        shifted = (packed.view(word)[..., None, :] << shifts) >> array.asarray(top, dtype=word)
        return shifted.astype(value).reshape(*words.shape[:-2], -1, words.shape[-1])

    def is_native_on(self, chip: "Chip", weights: "NumberFormat | None" = None) -> bool:
        """Whether a chip's matrix unit multiplies the format by itself or by `weights`."""
        return chip.multiplies(self, weights)

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


def signed_integer(
    bits: int, *, peak: PeakName | None = None, first_gpu: float | None = None
) -> NumberFormat:
    """Return the format of two's complement integers."""
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
INT8 = signed_integer(8, peak="int8", first_gpu=8.0)
UINT8 = _unsigned(8, peak="int8")
INT4 = signed_integer(4, peak="int4")

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
    signed_integer(64),
    signed_integer(32),
    signed_integer(16),
    INT8,
    INT4,
    signed_integer(2),
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
    """Return the format with a name such as "bfloat16", "bf16", "BF16", "fp8" or "s8".

    Raises:
        TPUValidationError: There is no such format; the message names the nearest.
    """
    if isinstance(name, NumberFormat):
        return name
    found = _find(name)
    if found is None:
        usual = "float32, bfloat16, float16, fp8, int8 and int4"
        near = did_you_mean(name.strip().lower(), _by_spelling()) or f" Usual ones are {usual}."
        raise TPUValidationError(f"{name!r} is not a number format.{near}")
    return found


def spelled_as(name: str, allowed: Iterable[str]) -> str | None:
    """Return the word of `allowed` that means the same as `name`, or None.

    For example, "bf16" means "bfloat16" if that is allowed. Allowed words that are no number
    formats match only themselves.
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
    return {
        spelling: format
        for format in FORMATS
        for spelling in (format.name, format.hlo, *format.aliases)
    }

"""Storage formats of weights and optimizer moments: narrow values, and the scales they share.

Sizes follow from the definition: int4 with one float32 scale per 128 values takes
4 + 32 / 128 = 4.25 bits per value. A weight format is one entry of `WEIGHT_FORMATS`: rounding,
packing, files, plans and matmuls all read it from there.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import TPUValidationError, did_you_mean
from .formats import (
    BFLOAT16,
    FLOAT8_E4M3FN,
    FLOAT32,
    INT4,
    INT8,
    UINT8,
    A,
    NumberFormat,
    parse_format,
    spelled_as,
)

BYTE_BITS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredFormat:
    """How an array is stored. Values share scales along lines, such as the columns of a weight.

    Attributes:
        values: Number format of a stored value, or of the code of a group.
        scales: Number format of the scales; None for formats without scales.
        block: Consecutive values of a line that share a scale; None for the whole line.
        padded_to: Lines are padded to a multiple of this many values.
        group: Consecutive values of a line per code; a code is the index of a codebook entry.
        stages: Codes per group; their codebook entries are summed.
        entries: Entries of each stage's codebook; an entry has `group` int8 values.
    """

    values: NumberFormat
    scales: NumberFormat | None = None
    block: int | None = None
    padded_to: int = 1
    group: int = 1
    stages: int = 1
    entries: int = 0

    @property
    def is_packed(self) -> bool:
        """Whether several values share a 32-bit word."""
        return self.group == 1 and self.values.bits < BYTE_BITS

    @property
    def has_codebook(self) -> bool:
        """Whether a code is the index of a codebook entry."""
        return self.entries > 0

    @property
    def has_integers(self) -> bool:
        """Whether integer activations can multiply the decoded values."""
        return self.values.kind != "float"

    @property
    def values_per_element(self) -> int:
        """Values of a line per array element: a code's group, or the values packed into a word."""
        if self.group > 1:
            return self.group
        return self.values.values_per_word if self.is_packed else 1

    @property
    def multiple(self) -> int:
        """Padded lines are a multiple of this many values."""
        return math.lcm(self.padded_to, self.values_per_element)

    @property
    def dtype(self) -> str:
        """Name of the dtype of the stored array."""
        return "int32" if self.is_packed else self.values.name

    def pack(self, values: A) -> A:
        """Return the stored array of values (rows, columns) whose columns are the lines."""
        return self.values.pack(values) if self.is_packed else values

    def unpack(self, stored: A) -> A:
        """Return the values that `pack` was given."""
        return self.values.unpack(stored) if self.is_packed else stored

    def nbytes(self, length: int, lines: int = 1) -> int:
        """Return the bytes of an array of `lines` lines with `length` values each."""
        padded = -(-length // self.multiple) * self.multiple
        elements = self.stages * (padded // self.values_per_element) * lines
        stored = elements * parse_format(self.dtype).itemsize
        codebook = INT8.nbytes(self.stages * self.entries * self.group)
        return stored + self._scale_bytes(padded, lines) + codebook

    def _scale_bytes(self, length: int, lines: int) -> int:
        if self.scales is None:
            return 0
        blocks = -(-length // (self.block or length)) if length else 0
        return self.scales.nbytes(blocks * lines)

    def bits_per_value(self, length: int, lines: int = 1) -> float:
        """Return the bits per value of such an array, including scales, padding and codebook."""
        return 8 * self.nbytes(length, lines) / (length * lines)


# How `kernels.quantized_matmul` stores a (K, N) weight. Its kernels split K into 128 lanes.
_LANES = 128
WEIGHT_FORMATS: dict[str, StoredFormat] = {
    "bf16": StoredFormat(values=BFLOAT16),
    "int8": StoredFormat(values=INT8, scales=FLOAT32, padded_to=_LANES),
    "int4": StoredFormat(values=INT4, scales=FLOAT32, block=128, padded_to=_LANES),
    "fp8": StoredFormat(values=FLOAT8_E4M3FN, scales=FLOAT32, padded_to=_LANES),
    "vq": StoredFormat(values=UINT8, scales=FLOAT32, padded_to=_LANES, group=4, entries=128),
}


def rounded_formats() -> tuple[str, ...]:
    """Return the names of weight formats whose values are rounded numbers with scales."""
    return tuple(
        name
        for name, format in WEIGHT_FORMATS.items()
        if format.scales is not None and not format.has_codebook
    )


# Adam's two moments, by the name of the first moment's format as in `OptimizerSpec`. The second
# moment needs the range of float32, or in int8 a scale per small block.
MOMENT_FORMATS: dict[str, tuple[StoredFormat, StoredFormat]] = {
    "float32": (StoredFormat(values=FLOAT32), StoredFormat(values=FLOAT32)),
    "bfloat16": (StoredFormat(values=BFLOAT16), StoredFormat(values=FLOAT32)),
    "int8": (
        StoredFormat(values=INT8, scales=FLOAT32, block=256),
        StoredFormat(values=UINT8, scales=FLOAT32, block=256),
    ),
}


SCALE = BFLOAT16


class Unit(NamedTuple):
    """A group of a token's channels that is rounded together: a head's, or a latent's.

    Attributes:
        number: Units per token.
        width: Channels per unit.
    """

    number: int
    width: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheFormat:
    """How the cache stores a token's channels.

    Attributes:
        name: Value of `--kv`.
        codes: Number format of one code.
        group: Channels per code; a code is the index of a codebook entry.
        entries: Entries of each codebook; a layer has one for keys and one for values.
        block: Largest number of channels that share a scale; None for formats without scales.
        first: Tokens at the beginning that are also kept in bfloat16.
        recent: Newest tokens that are also kept in bfloat16.
    """

    name: str
    codes: NumberFormat
    group: int = 1
    entries: int = 0
    block: int | None = None
    first: int = 0
    recent: int = 0

    @property
    def is_narrow(self) -> bool:
        """Whether tokens are rotated and rounded with their own scales."""
        return self.block is not None

    @property
    def wide(self) -> int:
        """Number of tokens that are kept in bfloat16 beside the codes."""
        return self.first + self.recent

    def sharing(self, width: int) -> int:
        """Return how many channels of a unit share a scale: a power of two that divides `width`."""
        assert self.block is not None
        return min(width & -width, self.block)

    def code_bytes(self, width: int) -> int:
        """Return the bytes of the codes of one unit of a token.

        Raises:
            TPUValidationError: A code would span two units.
        """
        if width % self.group or width // self.group * self.codes.bits % 8:
            raise TPUValidationError(
                f"a KV cache in {self.name} has {8 // self.codes.bits * self.group} channels per "
                f"byte, but a unit has {width}, which is no multiple of that; use int8."
            )
        return self.codes.nbytes(width // self.group)

    def narrows(self, tokens: int) -> bool:
        """Whether this many tokens are stored as codes; a few are smaller in bfloat16."""
        return self.is_narrow and tokens > 2 * self.wide

    def nbytes(self, units: Iterable[Unit], tokens: int) -> int:
        """Return the bytes of `tokens` tokens of a sequence in one layer, without codebooks."""
        each = list(units)
        channels = sum(unit.number * unit.width for unit in each)
        if not self.is_narrow:
            return self.codes.nbytes(channels * tokens)
        if not self.narrows(tokens):
            return BFLOAT16.nbytes(channels * tokens)
        codes = sum(unit.number * self.code_bytes(unit.width) for unit in each)
        scales = sum(unit.number * unit.width // self.sharing(unit.width) for unit in each)
        return tokens * (codes + SCALE.nbytes(scales)) + BFLOAT16.nbytes(channels * self.wide)


# fp8 as servers store it, without scales.
CACHE_FORMATS: dict[str, CacheFormat] = {
    format.name: format
    for format in (
        CacheFormat(name="bf16", codes=BFLOAT16),
        CacheFormat(name="fp8", codes=FLOAT8_E4M3FN),
        CacheFormat(name="int8", codes=INT8, block=128),
        CacheFormat(name="int4", codes=INT4, block=32, first=4, recent=32),
        CacheFormat(
            name="pq4", codes=UINT8, group=2, entries=256, block=128, first=4, recent=32
        ),
        CacheFormat(
            name="pq2", codes=UINT8, group=4, entries=256, block=128, first=4, recent=32
        ),
    )
}  # fmt: skip


def parse_cache_format(name: str | CacheFormat) -> CacheFormat:
    """Return the cache format with a name such as "int4", "pq4", "bf16" or "bfloat16".

    Raises:
        TPUValidationError: There is no such format; the message names the nearest.
    """
    if isinstance(name, CacheFormat):
        return name
    found = spelled_as(name, CACHE_FORMATS)
    if found is None:
        raise TPUValidationError(
            f"'{name}' is not a cache format; use {', '.join(CACHE_FORMATS)}."
            + did_you_mean(name, CACHE_FORMATS)
        )
    return CACHE_FORMATS[found]

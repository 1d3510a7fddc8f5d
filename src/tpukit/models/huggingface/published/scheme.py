"""Quantized checkpoint formats: their settings, the protocol of a format, and a decoded weight."""

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import DTypeLike

from ....errors import TPUModelError
from ....plain_data import JsonMapping

EXACT_DTYPES = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32))


@dataclass(frozen=True)
class PublishedWeight:
    """Values of one or more (out, in) matrices with a scale per block.

    The matrix is `(values - zeros) * scales`, with scales and zeros broadcast over their blocks.

    Attributes:
        values: (..., out, in) integers, float8 numbers, or values of codes.
        scales: (..., block rows, block columns), one per block.
        block: Rows and columns of values that share a scale; the last block may be smaller.
        zeros: Zero points in the shape of the scales, or None.
        groups: The column of scales for each input, where it is not the column of its block.
        transposed: Whether the model has the matrix as (in, out), as experts of GPT-OSS.
    """

    values: np.ndarray
    scales: np.ndarray
    block: tuple[int, int]
    zeros: np.ndarray | None = None
    groups: np.ndarray | None = None
    transposed: bool = False

    def __post_init__(self) -> None:
        if not self.values.size or not self.scales.size:
            raise TPUModelError(
                f"values are {self.values.shape} and scales {self.scales.shape}, which are empty; "
                "download the file again."
            )
        *before, rows, columns = self.values.shape
        grid = (-(-rows // self.block[0]), -(-columns // self.block[1]))
        if self.groups is not None:
            grid = (grid[0], self.scales.shape[-1])
            if self.groups.shape != (columns,) or not _within(self.groups, grid[1]):
                raise TPUModelError(
                    f"the groups of inputs are {self.groups.shape} numbers up to "
                    f"{int(self.groups.max(initial=0))}; expected {columns} below {grid[1]}."
                )
        expected = (*before, *grid)
        for name, found in (("scales", self.scales), ("zero points", self.zeros)):
            if found is not None and found.shape != expected:
                raise TPUModelError(
                    f"{name} are {found.shape}; expected {expected} for values of "
                    f"{self.values.shape} in blocks of {self.block[0]}×{self.block[1]}."
                )
        if not np.isfinite(self.scales.astype(np.float32)).all():
            raise TPUModelError("some scales are not finite; the file is damaged.")

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the matrix in the model."""
        *before, rows, columns = self.values.shape
        return (*before, columns, rows) if self.transposed else (*before, rows, columns)

    @cached_property
    def signed(self) -> np.ndarray:
        """Integer values minus their zero points; other values unchanged."""
        if self.zeros is None:
            return self.values
        return self.values.astype(np.int16) - self.spread(self.zeros.astype(np.int16))

    @cached_property
    def exact(self) -> np.dtype | None:
        """The narrowest of bfloat16 and float32 that represents every number, or None."""
        wide = self._wide()
        held = (dtype for dtype in EXACT_DTYPES if (wide.astype(dtype) == wide).all())
        return next(held, None)

    def dequantize(self, dtype: DTypeLike = ml_dtypes.bfloat16) -> np.ndarray:
        """Return the matrix, rounded once from exact products."""
        found = self._wide().astype(dtype)
        return np.swapaxes(found, -1, -2) if self.transposed else found

    def spread(self, of_blocks: np.ndarray) -> np.ndarray:
        """Return numbers per block broadcast to one number per value."""
        rows, columns = self.values.shape[-2:]
        tall = np.repeat(of_blocks, self.block[0], axis=-2)[..., :rows, :]
        if self.groups is not None:
            return tall[..., self.groups]
        return np.repeat(tall, self.block[1], axis=-1)[..., :columns]

    def _wide(self) -> np.ndarray:
        # 53 bits hold every product of a narrow value with a float32 scale.
        return self.signed.astype(np.float64) * self.spread(self.scales.astype(np.float64))


def _within(numbers: np.ndarray, end: int) -> bool:
    return bool(((numbers >= 0) & (numbers < end)).all())


Json = JsonMapping
Activations = Literal["bfloat16", "int8", "float8_e4m3fn"]
WORD_BITS = 32
# Formats of scales.
FLOATS = "float16 bfloat16 float32"


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """The quantization settings of a checkpoint's matrices.

    Attributes:
        method: The usual name: "GPTQ", "AWQ".
        values: The number format of the values; "nf4" and "fp4-bnb" are tables, not formats.
        bits: Stored bits per value.
        block: Rows and columns that share a scale; None for all rows or columns.
        scale_bits: Bits per scale.
        zero_bits: Bits per zero point; 0 where values are symmetric.
        activations: The format of activations that the checkpoint was made for.
        experts_only: Whether only the matrices of experts are quantized.
        reordered: Whether the inputs of a group are not consecutive.
        packing: The packing variant of the format.
    """

    method: str
    values: str
    bits: int
    block: tuple[int | None, int | None]
    scale_bits: int = 16
    zero_bits: int = 0
    activations: Activations = "bfloat16"
    experts_only: bool = False
    reordered: bool = False
    packing: str = ""

    def nbytes(self, rows: int, columns: int) -> int:
        """Return the bytes of an (out, in) matrix with its scales and zero points."""
        tall, wide = (whole if part is None else part for whole, part in self._sides(rows, columns))
        blocks = -(-rows // tall) * -(-columns // wide)
        return (rows * columns * self.bits + blocks * (self.scale_bits + self.zero_bits) + 7) // 8

    def _sides(self, rows: int, columns: int) -> tuple[tuple[int, int | None], ...]:
        return (rows, self.block[0]), (columns, self.block[1])

    def __str__(self) -> str:
        parts: dict[tuple[int | None, int | None], str] = {
            (1, None): "a scale for each output",
            (None, None): "one scale",
        }
        rows, columns = self.block
        shared = parts.get(self.block) or f"scales for {rows} × {columns or 'all'}"
        zeros = ", zero points" if self.zero_bits else ""
        return f"{self.method}: {self.values}, {shared}{zeros}, activations {self.activations}"


class Tensors(Protocol):
    """Tensors by name, such as `TensorFiles`."""

    def __contains__(self, name: str, /) -> bool: ...

    def read(self, name: str) -> np.ndarray:
        """Return the tensor."""
        ...


class PublishedFormat(Protocol):
    """A published format of quantized weights."""

    @property
    def methods(self) -> tuple[str, ...]:
        """The names of the format in `quant_method`."""
        ...

    @property
    def marks(self) -> tuple[tuple[str, str], ...]:
        """Pairs of name endings: of a weight, and of a tensor that exists if it is quantized."""
        ...

    def scheme(self, config: Json) -> Scheme:
        """Return the settings of a `quantization_config`.

        Raises:
            TPUModelError: A setting is not supported; the message has the fix.
        """
        ...

    def decode(self, name: str, scheme: Scheme, tensors: Tensors) -> PublishedWeight:
        """Return the weight of this name from the tensors it is stored in.

        Raises:
            TPUModelError: The tensors do not match.
        """
        ...


def take(tensors: Tensors, name: str, dtypes: str, rank: int | None = None) -> np.ndarray:
    """Return a tensor after checking its dtype and number of dimensions.

    Raises:
        TPUModelError: The tensor has another dtype or number of dimensions.
    """
    found = tensors.read(name)
    if found.dtype.name not in dtypes.split() or (rank is not None and found.ndim != rank):
        wanted = dtypes.replace(" ", " or ") + (f" with {rank} dimensions" if rank else "")
        raise TPUModelError(
            f"'{name}' is {found.dtype.name}{list(found.shape)}; expected {wanted}."
        )
    return found


def unpack_bits(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Return values of `bits` bits from int32 words along the last axis, the lowest bits first.

    Values are packed without gaps, so a value may span two words.

    Raises:
        TPUModelError: The words have fewer than `count` values.
    """
    held = words.shape[-1] * WORD_BITS // bits
    if words.dtype != np.int32 or held < count:
        raise TPUModelError(
            f"packed values are {words.dtype}{list(words.shape)}, with {held} values of {bits} "
            f"bits per row; expected int32 words for {count}."
        )
    wide = np.ascontiguousarray(words).view(np.uint32).astype(np.uint64)
    following = np.concatenate([wide[..., 1:], np.zeros_like(wide[..., :1])], axis=-1)
    both = wide | (following << np.uint64(WORD_BITS))
    starts = np.arange(count) * bits
    shifts = (starts % WORD_BITS).astype(np.uint64)
    found = (both[..., starts // WORD_BITS] >> shifts) & np.uint64((1 << bits) - 1)
    return found.astype(np.int16)


def integer(config: Json, key: str, allowed: tuple[int, ...], default: int | None = None) -> int:
    """Return an entry of the configuration that must be one of these numbers.

    Raises:
        TPUModelError: The entry has another value.
    """
    found = config.get(key, default)
    if found not in allowed or isinstance(found, bool):
        raise TPUModelError(
            f"quantization_config has {key}={found!r}; expected {', '.join(map(str, allowed))}."
        )
    return int(found)  # pyright: ignore[reportArgumentType]  it is one of the numbers


def group_size(config: Json, default: int | None = None) -> int | None:
    """Return the number of consecutive inputs that share a scale, or None for all (-1 in files).

    Raises:
        TPUModelError: The entry is not a positive integer or -1.
    """
    found = config.get("group_size", default)
    if found in (None, -1):
        return None
    if not isinstance(found, int) or found < 1:
        raise TPUModelError(f"quantization_config has group_size={found!r}; expected 128, or -1.")
    return found

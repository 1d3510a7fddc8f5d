"""What a `quantization_config` says, and the protocol of what reads such weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from ....errors import TPUModelError
from .weight import PublishedWeight

Json = Mapping[str, Any]
Activations = Literal["bfloat16", "int8", "float8_e4m3fn"]
WORD_BITS = 32
# Formats that scales have.
FLOATS = "float16 bfloat16 float32"


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """How a checkpoint's matrices are quantized.

    Attributes:
        method: As people call it: "GPTQ", "AWQ".
        values: The number format of the values; "nf4" and "fp4-bnb" are tables, not formats.
        bits: Of a value, stored.
        block: Rows and columns that share a scale; None for all of a row or column.
        scale_bits: Of a scale.
        zero_bits: Of a zero point; 0 where values are symmetric.
        activations: What the checkpoint was made to be multiplied with.
        experts_only: Whether only the matrices of experts are quantized.
        reordered: Whether groups are of inputs that are no neighbours.
        packing: Which of several ways the format packs values in.
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
        """Bytes of an (out, in) matrix, with its scales and zero points."""
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
    """Tensors by name: what `TensorFiles` is, and a dictionary could be."""

    def __contains__(self, name: str, /) -> bool: ...

    def read(self, name: str) -> np.ndarray:
        """The tensor."""
        ...


class PublishedFormat(Protocol):
    """A way in which quantized weights are published."""

    @property
    def methods(self) -> tuple[str, ...]:
        """Its names in `quant_method`."""
        ...

    @property
    def marks(self) -> tuple[tuple[str, str], ...]:
        """Tensors of which one is there when a weight is quantized.

        What the weight's name ends in, and what that tensor's does instead.
        """
        ...

    def scheme(self, config: Json) -> Scheme:
        """What the `quantization_config` says.

        Raises:
            TPUModelError: Something that is not read here, with the way out.
        """
        ...

    def decode(self, name: str, scheme: Scheme, tensors: Tensors) -> PublishedWeight:
        """The weight of that name out of the tensors it is stored in.

        Raises:
            TPUModelError: They do not belong together.
        """
        ...


def take(tensors: Tensors, name: str, dtypes: str, rank: int | None = None) -> np.ndarray:
    """A tensor that must have one of these formats, and so many dimensions.

    Raises:
        TPUModelError: It has another.
    """
    found = tensors.read(name)
    if found.dtype.name not in dtypes.split() or (rank is not None and found.ndim != rank):
        wanted = dtypes.replace(" ", " or ") + (f" with {rank} dimensions" if rank else "")
        raise TPUModelError(
            f"'{name}' is {found.dtype.name}{list(found.shape)}; expected {wanted}."
        )
    return found


def unpack_bits(words: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Values of so many bits out of int32 words along the last axis, the lowest bits first.

    Values follow one another without gaps, so that one of three bits may lie in two words.

    Raises:
        TPUModelError: The words hold fewer than `count` values.
    """
    held = words.shape[-1] * WORD_BITS // bits
    if words.dtype != np.int32 or held < count:
        raise TPUModelError(
            f"packed values are {words.dtype}{list(words.shape)}, which hold {held} of {bits} bits "
            f"in a line; expected int32 words for {count}."
        )
    wide = np.ascontiguousarray(words).view(np.uint32).astype(np.uint64)
    following = np.concatenate([wide[..., 1:], np.zeros_like(wide[..., :1])], axis=-1)
    both = wide | (following << np.uint64(WORD_BITS))
    starts = np.arange(count) * bits
    shifts = (starts % WORD_BITS).astype(np.uint64)
    found = (both[..., starts // WORD_BITS] >> shifts) & np.uint64((1 << bits) - 1)
    return found.astype(np.int16)


def integer(config: Json, key: str, allowed: tuple[int, ...], default: int | None = None) -> int:
    """An entry of the configuration that is one of these numbers.

    Raises:
        TPUModelError: It is something else.
    """
    found = config.get(key, default)
    if found not in allowed or isinstance(found, bool):
        raise TPUModelError(
            f"quantization_config has {key}={found!r}; read are {', '.join(map(str, allowed))}."
        )
    return int(found)  # pyright: ignore[reportArgumentType]  it is one of the numbers


def group_size(config: Json, default: int | None = None) -> int | None:
    """Neighbours that share a scale; None for a whole line, which files write as -1.

    Raises:
        TPUModelError: It is no such number.
    """
    found = config.get("group_size", default)
    if found in (None, -1):
        return None
    if not isinstance(found, int) or found < 1:
        raise TPUModelError(f"quantization_config has group_size={found!r}; expected 128, or -1.")
    return found

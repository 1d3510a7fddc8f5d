"""One file of tokens: .npy or raw .bin, validated from its first bytes and mapped into memory."""

import io
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ...errors import TPUValidationError, did_you_mean

TOKEN_DTYPES = ("uint8", "uint16", "int32", "uint32", "int64")
SUFFIXES = (".npy", ".bin")
HEAD_BYTES = 4096  # enough for every header read here

# llm.c and the files made for it start with 256 int32: magic, version, number of tokens.
_LLMC_HEADER_BYTES = 1024
_LLMC_DTYPES = {20240520: "uint16", 20240801: "uint32"}


class TokenShard(Protocol):
    """A run of tokens that can be read anywhere."""

    @property
    def name(self) -> str:
        """Its name in messages."""
        ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """The format of the tokens as stored."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens in it."""
        ...

    def read(self, spans: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """The tokens from `start` to `stop` of each span, in the dtype of the shard."""
        ...


@dataclass(frozen=True)
class ShardLayout:
    """What the first bytes of a token file say."""

    dtype: np.dtype[Any]
    num_tokens: int
    offset_bytes: int


@dataclass(frozen=True, eq=False)
class ArrayShard:
    """Tokens in memory, or mapped from a file."""

    name: str
    tokens: np.ndarray

    @property
    def dtype(self) -> np.dtype[Any]:
        """The format of the tokens as stored."""
        return self.tokens.dtype

    @property
    def num_tokens(self) -> int:
        """Tokens in it."""
        return len(self.tokens)

    def read(self, spans: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """Views, nothing is copied."""
        tokens = self.tokens
        return [tokens[start:stop] for start, stop in spans]


def open_shard(path: Path, *, dtype: str | None = None) -> ArrayShard:
    """Map a token file into memory.

    Args:
        path: A .npy or .bin file.
        dtype: Of a .bin file; when left out what its name says (tokens.uint32.bin), else uint16.

    Raises:
        TPUValidationError: It holds no one-dimensional integers, or is damaged.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        layout = read_layout(str(path), file.read(HEAD_BYTES), size, dtype=dtype)
    if layout.num_tokens == 0:
        return ArrayShard(str(path), np.empty(0, layout.dtype))
    mapped = np.memmap(path, layout.dtype, "r", layout.offset_bytes, (layout.num_tokens,))
    # A plain view: slicing an np.memmap costs twice what slicing an array does.
    return ArrayShard(str(path), mapped.view(np.ndarray))


def read_layout(
    name: str, head: bytes, size_bytes: int, *, dtype: str | None = None
) -> ShardLayout:
    """Where the tokens of a file lie, from its first `HEAD_BYTES` bytes and its size.

    Raises:
        TPUValidationError: It holds no one-dimensional integers, or is damaged.
    """
    layout = _npy_layout(name, head) if name.endswith(".npy") else _bin_layout(name, head, dtype)
    length = size_bytes - layout.offset_bytes
    itemsize = layout.dtype.itemsize
    if layout.num_tokens < 0:  # raw: as many as there are
        if length % itemsize:
            raise TPUValidationError(
                f"{name} has {length} bytes, no multiple of the {itemsize} bytes of "
                f"{layout.dtype.name}; it is cut short, or holds another dtype (dtype='…')."
            )
        return ShardLayout(layout.dtype, length // itemsize, layout.offset_bytes)
    if length != layout.num_tokens * itemsize:
        raise TPUValidationError(
            f"{name} is corrupt: its header says {layout.num_tokens} {layout.dtype.name} tokens "
            f"({layout.num_tokens * itemsize} bytes) and {length} bytes follow; copy or prepare "
            "it again."
        )
    return layout


def check_token_dtype(name: str, dtype: np.dtype[Any], ndim: int = 1) -> None:
    """Refuse arrays that cannot be a stream of token numbers.

    Raises:
        TPUValidationError: Not integers, or not one-dimensional.
    """
    if dtype.name not in TOKEN_DTYPES or dtype.hasobject:
        raise TPUValidationError(
            f"{name} holds {dtype.name}; tokens are one-dimensional {', '.join(TOKEN_DTYPES)}. "
            "Convert it with tokens.astype('uint32')."
        )
    if ndim != 1:
        raise TPUValidationError(
            f"{name} is {ndim}-dimensional; tokens are one long one-dimensional array, which is "
            "cut into sequences here. Save tokens.reshape(-1)."
        )


def parse_token_dtype(dtype: str) -> np.dtype[Any]:
    """A dtype by name, little-endian.

    Raises:
        TPUValidationError: It is none that tokens come in.
    """
    if dtype not in TOKEN_DTYPES:
        raise TPUValidationError(
            f"'{dtype}' is no dtype of tokens; use {', '.join(TOKEN_DTYPES)}."
            + did_you_mean(dtype, TOKEN_DTYPES)
        )
    return np.dtype(dtype).newbyteorder("<")


def _npy_layout(name: str, head: bytes) -> ShardLayout:
    file = io.BytesIO(head)
    try:
        version = np.lib.format.read_magic(file)
        read = (
            np.lib.format.read_array_header_1_0
            if version == (1, 0)
            else np.lib.format.read_array_header_2_0
        )
        shape, _, dtype = read(file)
    except (ValueError, SyntaxError, tokenize.TokenError) as error:  # numpy parses it as Python
        raise TPUValidationError(
            f"{name} is no .npy file ({str(error).splitlines()[0]}); it is damaged, or has the "
            "wrong ending."
        ) from None
    check_token_dtype(name, dtype, len(shape))
    return ShardLayout(dtype, shape[0], file.tell())


def _bin_layout(name: str, head: bytes, dtype: str | None) -> ShardLayout:
    if len(head) >= _LLMC_HEADER_BYTES:
        magic, _, count = (int(word) for word in np.frombuffer(head, "<i4", 3))
        if magic in _LLMC_DTYPES:
            stored = parse_token_dtype(dtype or _LLMC_DTYPES[magic])
            return ShardLayout(stored, count, _LLMC_HEADER_BYTES)
    parts = name.rsplit("/", 1)[-1].split(".")
    said = dtype or next((part for part in parts if part in TOKEN_DTYPES), None)
    stored = parse_token_dtype(said or "uint16")
    if said is None and _looks_like_32_bits(head):
        raise TPUValidationError(
            f"{name} does not say its dtype, and read as uint16 every other token is nearly 0: it "
            "looks like 32-bit tokens. Name it ….uint32.bin (or ….uint16.bin if that is right), "
            "or say dtype='uint32'."
        )
    return ShardLayout(stored, -1, 0)


def _looks_like_32_bits(head: bytes) -> bool:
    """Whether the upper halves of 32-bit words hold next to nothing and the lower ones do."""
    words = np.frombuffer(head[: len(head) // 4 * 4], "<u2").reshape(-1, 2)
    return len(words) >= 64 and int(words[:, 1].max()) <= 3 and int(words[:, 0].max()) > 3

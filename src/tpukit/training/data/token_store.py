"""Token files (.npy or raw .bin), and all files of a data set as one long run of tokens."""

import hashlib
import io
import tokenize
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from ...errors import TPUValidationError, did_you_mean

TOKEN_DTYPES = ("uint8", "uint16", "int32", "uint32", "int64")
SUFFIXES = (".npy", ".bin")
HEAD_BYTES = 4096  # enough for every header

# Files of llm.c start with 256 int32: magic number, version, number of tokens, padding.
_LLMC_HEADER_BYTES = 1024
_LLMC_DTYPES = {20240520: "uint16", 20240801: "uint32"}


class TokenShard(Protocol):
    """A run of tokens with random access."""

    @property
    def name(self) -> str:
        """The name in messages."""
        ...

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the stored tokens."""
        ...

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        ...

    def read(self, spans: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """Return the tokens from `start` to `stop` of each span, in the shard's dtype."""
        ...


@dataclass(frozen=True)
class ShardLayout:
    """The layout of a token file, from its first bytes."""

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
        """The dtype of the stored tokens."""
        return self.tokens.dtype

    @property
    def num_tokens(self) -> int:
        """Number of tokens."""
        return len(self.tokens)

    def read(self, spans: Sequence[tuple[int, int]]) -> list[np.ndarray]:
        """Return views, without a copy."""
        tokens = self.tokens
        return [tokens[start:stop] for start, stop in spans]


def open_shard(path: Path, *, dtype: str | None = None) -> ArrayShard:
    """Map a token file into memory.

    Args:
        path: A .npy or .bin file.
        dtype: Element type of a .bin file; by default that of its name (tokens.uint32.bin), or
            uint16.

    Raises:
        TPUValidationError: The file is not of one-dimensional integers, or is damaged.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        layout = read_layout(str(path), file.read(HEAD_BYTES), size, dtype=dtype)
    if layout.num_tokens == 0:
        return ArrayShard(str(path), np.empty(0, layout.dtype))
    mapped = np.memmap(path, layout.dtype, "r", layout.offset_bytes, (layout.num_tokens,))
    # As a plain array, because slicing an np.memmap takes twice as long.
    return ArrayShard(str(path), mapped.view(np.ndarray))


def read_layout(
    name: str, head: bytes, size_bytes: int, *, dtype: str | None = None
) -> ShardLayout:
    """Return the layout of a token file, from its first `HEAD_BYTES` bytes and its size.

    Raises:
        TPUValidationError: The file is not of one-dimensional integers, or is damaged.
    """
    layout = _npy_layout(name, head) if name.endswith(".npy") else _bin_layout(name, head, dtype)
    length = size_bytes - layout.offset_bytes
    itemsize = layout.dtype.itemsize
    if layout.num_tokens < 0:  # raw: the size decides
        if length % itemsize:
            raise TPUValidationError(
                f"{name} has {length} bytes, which is not a multiple of the {itemsize} bytes of "
                f"{layout.dtype.name}; it is truncated, or has another dtype (dtype='…')."
            )
        return ShardLayout(layout.dtype, length // itemsize, layout.offset_bytes)
    if length != layout.num_tokens * itemsize:
        raise TPUValidationError(
            f"{name} is corrupt: its header has {layout.num_tokens} {layout.dtype.name} tokens "
            f"({layout.num_tokens * itemsize} bytes), but {length} bytes follow; copy or prepare "
            "it again."
        )
    return layout


def check_token_dtype(name: str, dtype: np.dtype[Any], ndim: int = 1) -> None:
    """Refuse arrays that are not token numbers.

    Raises:
        TPUValidationError: The array is not of integers, or not one-dimensional.
    """
    if dtype.name not in TOKEN_DTYPES or dtype.hasobject:
        raise TPUValidationError(
            f"{name} contains {dtype.name}; expected one-dimensional {', '.join(TOKEN_DTYPES)}. "
            "Convert it with tokens.astype('uint32')."
        )
    if ndim != 1:
        raise TPUValidationError(
            f"{name} is {ndim}-dimensional; expected one long one-dimensional array, which tpukit "
            "cuts into sequences. Save tokens.reshape(-1)."
        )


def parse_token_dtype(dtype: str) -> np.dtype[Any]:
    """Return a dtype by name, little-endian.

    Raises:
        TPUValidationError: Tokens cannot have this dtype.
    """
    if dtype not in TOKEN_DTYPES:
        raise TPUValidationError(
            f"'{dtype}' is not a token dtype; use {', '.join(TOKEN_DTYPES)}."
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
            f"{name} is not an .npy file ({str(error).splitlines()[0]}); it is damaged, or has the "
            "wrong file name."
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
    named = dtype or next((part for part in parts if part in TOKEN_DTYPES), None)
    stored = parse_token_dtype(named or "uint16")
    if named is None and _looks_like_32_bits(head):
        raise TPUValidationError(
            f"{name} has no dtype in its name, and as uint16 every other token is nearly 0, so it "
            "looks like 32-bit tokens. Name it ….uint32.bin (or ….uint16.bin if that is right), "
            "or give dtype='uint32'."
        )
    return ShardLayout(stored, -1, 0)


def _looks_like_32_bits(head: bytes) -> bool:
    """Return whether the upper halves of 32-bit words are nearly 0 and the lower ones are not."""
    words = np.frombuffer(head[: len(head) // 4 * 4], "<u2").reshape(-1, 2)
    return len(words) >= 64 and int(words[:, 1].max()) <= 3 and int(words[:, 0].max()) > 3


_SAMPLE_TOKENS = 1024
_FILES_AT_ONCE = 16
_LARGEST_INT32 = 2**31 - 1


@dataclass(frozen=True, eq=False)
class TokenStore:
    """Tokens of one data set.

    Attributes:
        shards: The files in reading order; together they are one run of tokens.
        kind: "npy", "bin", "prepared", "array", …
        path: The path in messages.
        documents: Index of each document's first token, and the number of tokens at the end; None
            if unknown.
        largest_token: The largest token number; None if unknown.
        tokenizer: Description of the tokenizer, if known.
        checksum: Checksum of all tokens, if known; otherwise samples are hashed.
        file_checksums: Checksum of each file when it was written, by name.
        answers: Starts and ends of the learned tokens, in turns; None if all are learned.
    """

    shards: tuple[TokenShard, ...]
    kind: str
    path: str
    documents: np.ndarray | None = None
    largest_token: int | None = None
    tokenizer: dict[str, Any] = field(default_factory=dict)
    checksum: str | None = None
    file_checksums: dict[str, str] = field(default_factory=dict)
    answers: np.ndarray | None = None

    @cached_property
    def offsets(self) -> np.ndarray:
        """Index of each shard's first token, and the number of tokens at the end."""
        return np.cumsum([0, *(shard.num_tokens for shard in self.shards)])

    @property
    def num_tokens(self) -> int:
        """Number of tokens in all shards."""
        return int(self.offsets[-1])

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The widest dtype of the shards."""
        return np.result_type(*(shard.dtype for shard in self.shards))

    @cached_property
    def fingerprint(self) -> str:
        """A hash of length and samples of each shard, independent of the path."""
        if self.checksum is not None:
            return self.checksum
        digest = hashlib.blake2b(digest_size=16)
        with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:  # in a bucket they have a latency
            for sample in pool.map(_sample, self.shards):
                digest.update(sample)
        return digest.hexdigest()

    def read(self, starts: Sequence[int], stops: Sequence[int]) -> list[np.ndarray]:
        """Return the tokens of each span, in at most 32 bits; spans may cross shards.

        Raises:
            TPUValidationError: A token number needs more than 32 bits.
        """
        if len(self.shards) == 1:
            spans = self.shards[0].read(list(zip(starts, stops, strict=True)))
        else:
            spans = self._read_across(starts, stops)
        if any(tokens.dtype.itemsize > 4 for tokens in spans):
            return [self._narrow(tokens) for tokens in spans]
        return spans

    def learned(self, start: int, stop: int) -> np.ndarray | None:
        """Return whether each token from `start` to `stop` is learned; None if all are."""
        if self.answers is None:
            return None
        edges_before = np.searchsorted(self.answers, np.arange(start, stop), side="right")
        return edges_before % 2 == 1

    def _read_across(self, starts: Sequence[int], stops: Sequence[int]) -> list[np.ndarray]:
        wanted: dict[int, list[tuple[int, int]]] = {}
        owners: list[list[tuple[int, int]]] = []  # per span: (shard, index among its spans)
        first = np.searchsorted(self.offsets, starts, side="right") - 1
        for start, stop, begin in zip(starts, stops, first, strict=True):
            pieces: list[tuple[int, int]] = []
            shard = int(begin)
            while start < stop:
                base, end = int(self.offsets[shard]), int(self.offsets[shard + 1])
                spans = wanted.setdefault(shard, [])
                if end > start:
                    pieces.append((shard, len(spans)))
                    spans.append((start - base, min(stop, end) - base))
                start, shard = max(start, min(stop, end)), shard + 1
            owners.append(pieces)
        read = {shard: self.shards[shard].read(spans) for shard, spans in wanted.items() if spans}
        return [_joined([read[shard][index] for shard, index in pieces]) for pieces in owners]

    def _narrow(self, tokens: np.ndarray) -> np.ndarray:
        largest, smallest = int(tokens.max(initial=0)), int(tokens.min(initial=0))
        if largest > _LARGEST_INT32 or smallest < 0:
            raise TPUValidationError(
                f"{self.path} contains the token {smallest if smallest < 0 else largest}; expected "
                f"0 to {_LARGEST_INT32}. Its dtype may not be {self.dtype.name}."
            )
        return tokens.astype(np.int32)


def _sample(shard: TokenShard) -> bytes:
    count = shard.num_tokens
    places = sorted({0, count // 2, max(count - _SAMPLE_TOKENS, 0)})
    spans = [(start, min(start + _SAMPLE_TOKENS, count)) for start in places]
    parts = [tokens.astype("<i8").tobytes() for tokens in shard.read(spans)]
    return b"".join([f"{count};".encode(), *parts])


def _joined(pieces: list[np.ndarray]) -> np.ndarray:
    return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

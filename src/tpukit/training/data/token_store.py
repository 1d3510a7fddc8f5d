"""All shards of a data set as one long run of tokens, read anywhere, never loaded whole."""

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from ...errors import TPUValidationError
from .shards import TokenShard

_SAMPLE_TOKENS = 1024
_FILES_AT_ONCE = 16
_LARGEST_INT32 = 2**31 - 1


@dataclass(frozen=True, eq=False)
class TokenStore:
    """Tokens of one data set.

    Attributes:
        shards: In reading order; together they are one run of tokens.
        kind: What it was found as: "npy", "bin", "prepared", "array", …
        path: Where it is, for messages.
        documents: Where documents start, and at the end the number of tokens; None if unknown.
        largest_token: The largest token number there is, where somebody counted; else None.
        tokenizer: What made the tokens, where it is known.
        checksum: Of all tokens, where somebody kept one; else samples are taken.
        file_checksums: What the content of each file was when it was written, by name.
        answers: Where what is to be predicted begins and ends, in turns; None where all is.
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
        """Where each shard starts in the run, and at the end where the last one stops."""
        return np.cumsum([0, *(shard.num_tokens for shard in self.shards)])

    @property
    def num_tokens(self) -> int:
        """Tokens in all shards."""
        return int(self.offsets[-1])

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The widest dtype of the shards."""
        return np.result_type(*(shard.dtype for shard in self.shards))

    @cached_property
    def fingerprint(self) -> str:
        """Tells data sets apart by length and by a sample of each shard, wherever they lie."""
        if self.checksum is not None:
            return self.checksum
        digest = hashlib.blake2b(digest_size=16)
        with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:  # shards may be far away
            for sample in pool.map(_sample, self.shards):
                digest.update(sample)
        return digest.hexdigest()

    def read(self, starts: Sequence[int], stops: Sequence[int]) -> list[np.ndarray]:
        """The tokens of each span, at most 32 bits wide; spans may cross from shard to shard.

        Raises:
            TPUValidationError: A token number does not fit in 32 bits.
        """
        if len(self.shards) == 1:
            found = self.shards[0].read(list(zip(starts, stops, strict=True)))
        else:
            found = self._read_across(starts, stops)
        if any(tokens.dtype.itemsize > 4 for tokens in found):
            return [self._narrow(tokens) for tokens in found]
        return found

    def learnt(self, start: int, stop: int) -> np.ndarray | None:
        """Whether each token from `start` to `stop` is to be predicted; None where all are."""
        if self.answers is None:
            return None
        edges_before = np.searchsorted(self.answers, np.arange(start, stop), side="right")
        return edges_before % 2 == 1

    def _read_across(self, starts: Sequence[int], stops: Sequence[int]) -> list[np.ndarray]:
        wanted: dict[int, list[tuple[int, int]]] = {}
        owners: list[list[tuple[int, int]]] = []  # per span: (shard, place among its spans)
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
        return [_joined([read[shard][place] for shard, place in pieces]) for pieces in owners]

    def _narrow(self, tokens: np.ndarray) -> np.ndarray:
        largest, smallest = int(tokens.max(initial=0)), int(tokens.min(initial=0))
        if largest > _LARGEST_INT32 or smallest < 0:
            raise TPUValidationError(
                f"{self.path} holds the token {smallest if smallest < 0 else largest}; token "
                f"numbers go from 0 to {_LARGEST_INT32}. Its dtype may not be {self.dtype.name}."
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

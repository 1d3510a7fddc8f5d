"""What `tpukit data prepare` leaves behind: token shards and a file that says what they are."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ...errors import TPUValidationError
from ...plain_data import parse_json
from .shards import TokenShard, parse_token_dtype

MANIFEST, DOCUMENTS, ANSWERS = "tokens.json", "documents.npy", "answers.npy"
FORMAT, VERSION = "tpukit tokens", 1


@dataclass(frozen=True, kw_only=True)
class ShardEntry:
    """A shard and what it must be."""

    file: str
    num_tokens: int
    blake2b: str


@dataclass(frozen=True, kw_only=True)
class DataManifest:
    """What a prepared folder holds.

    Attributes:
        answers_blake2b: Of `answers.npy`, where some tokens only are to be predicted.
    """

    dtype: str
    num_tokens: int
    num_documents: int
    smallest_token: int
    largest_token: int
    tokenizer: Mapping[str, Any]
    shards: tuple[ShardEntry, ...]
    answers_blake2b: str | None = None

    @property
    def checksum(self) -> str:
        """The checksum of all tokens, from those of the shards, and of which are predicted."""
        parts = [f"{entry.num_tokens};{entry.blake2b};" for entry in self.shards]
        parts += [] if self.answers_blake2b is None else [f"answers;{self.answers_blake2b};"]
        return hashlib.blake2b("".join(parts).encode(), digest_size=16).hexdigest()

    def to_json(self) -> str:
        """The manifest as it is written."""
        content = asdict(self)
        if self.answers_blake2b is None:  # as earlier versions read it
            del content["answers_blake2b"]
        return json.dumps({"format": FORMAT, "version": VERSION, **content}, indent=1) + "\n"


def read_manifest(content: bytes, *, name: str) -> DataManifest:
    """Parse a manifest.

    Raises:
        TPUValidationError: It is damaged, or newer than this tpukit.
    """
    try:
        data = parse_json(content)
        if data.pop("format") != FORMAT:
            raise ValueError("another format")
        version = data.pop("version")
        if version != VERSION:
            raise TPUValidationError(
                f"{name} has version {version}, this tpukit reads {VERSION}; prepare the data "
                "again, or install the tpukit that made it."
            )
        shards = tuple(ShardEntry(**entry) for entry in data.pop("shards"))
        manifest = DataManifest(shards=shards, **data)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, TPUValidationError):
            raise
        raise TPUValidationError(
            f"{name} is not what 'tpukit data prepare' writes ({error}); prepare the data again."
        ) from None
    parse_token_dtype(manifest.dtype)
    return manifest


def check_shards(
    manifest: DataManifest, shards: Sequence[TokenShard | None], *, folder: str
) -> tuple[TokenShard, ...]:
    """Compare shards, None where one is not there, with what the manifest says.

    Raises:
        TPUValidationError: A shard is missing, or is not what the manifest says.
    """
    checked: list[TokenShard] = []
    for entry, shard in zip(manifest.shards, shards, strict=True):
        if shard is None:
            raise TPUValidationError(
                f"{folder}/{entry.file} is missing, one of {len(manifest.shards)} shards; copy "
                "the whole folder again."
            )
        if shard.num_tokens != entry.num_tokens or shard.dtype.name != manifest.dtype:
            raise TPUValidationError(
                f"{folder}/{entry.file} is corrupt: it holds {shard.num_tokens} "
                f"{shard.dtype.name} tokens and its manifest says {entry.num_tokens} "
                f"{manifest.dtype}; copy or prepare it again."
            )
        checked.append(shard)
    return tuple(checked)


def check_documents(documents: np.ndarray, num_tokens: int, *, name: str) -> np.ndarray:
    """Refuse offsets of documents that do not belong to the tokens.

    Raises:
        TPUValidationError: They do not rise from 0 to the number of tokens.
    """
    fits = len(documents) > 0 and documents[0] == 0 and documents[-1] == num_tokens
    if not fits or bool((np.diff(documents.astype(np.int64)) < 0).any()):
        raise TPUValidationError(
            f"{name} does not fit its tokens: offsets of documents rise from 0 to {num_tokens}, "
            "the number of tokens. Prepare the data again."
        )
    return documents


def answers_checksum(answers: np.ndarray) -> str:
    """The checksum of where answers begin and end."""
    return hashlib.blake2b(answers.astype("<i8").tobytes(), digest_size=16).hexdigest()


def check_answers(answers: np.ndarray, manifest: DataManifest, *, name: str) -> np.ndarray:
    """Refuse beginnings and ends of answers that do not belong to the tokens.

    Raises:
        TPUValidationError: They are not those written, or do not rise within the tokens.
    """
    rising = bool((np.diff(answers) >= 0).all()) and len(answers) % 2 == 0
    within = not len(answers) or (answers[0] >= 0 and answers[-1] <= manifest.num_tokens)
    if not (rising and within) or answers_checksum(answers) != manifest.answers_blake2b:
        raise TPUValidationError(
            f"{name} is not what its manifest says; copy or prepare the data again."
        )
    return answers

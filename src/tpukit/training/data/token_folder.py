"""The folder that `tpukit data prepare` writes: token shards and a manifest."""

import hashlib
import json
import os
from array import array
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError

from ...errors import TPUValidationError
from ...plain_data import parse_json
from ...runtime.files import finish_folder, folder_beside
from .token_store import TokenShard, parse_token_dtype

MANIFEST, DOCUMENTS, ANSWERS = "tokens.json", "documents.npy", "answers.npy"
FORMAT, VERSION = "tpukit tokens", 1


@dataclass(frozen=True, kw_only=True)
class ShardEntry:
    """A shard's file, length and checksum."""

    file: str
    num_tokens: int
    blake2b: str


@dataclass(frozen=True, kw_only=True)
class DataManifest:
    """The content of `tokens.json`.

    Attributes:
        answers_blake2b: Checksum of `answers.npy`, if only some tokens are learned.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")  # newer manifests have another version

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
        """A checksum of all tokens and of which are learned, from the checksums of the files."""
        parts = [f"{entry.num_tokens};{entry.blake2b};" for entry in self.shards]
        parts += [] if self.answers_blake2b is None else [f"answers;{self.answers_blake2b};"]
        return hashlib.blake2b("".join(parts).encode(), digest_size=16).hexdigest()

    def to_json(self) -> str:
        """Return the manifest as JSON text."""
        content = asdict(self)
        if self.answers_blake2b is None:  # so that earlier versions can read it
            del content["answers_blake2b"]
        return json.dumps({"format": FORMAT, "version": VERSION, **content}, indent=1) + "\n"


def read_manifest(content: bytes, *, name: str) -> DataManifest:
    """Parse a manifest.

    Raises:
        TPUValidationError: The manifest is damaged, or newer than this tpukit.
    """
    try:
        data = parse_json(content)
        if data.pop("format") != FORMAT:
            raise ValueError("another format")
        version = data.pop("version")
        if version != VERSION:
            raise TPUValidationError(
                f"{name} has version {version}, but this tpukit reads {VERSION}; prepare the data "
                "again, or install the tpukit that wrote it."
            )
        manifest = TypeAdapter(DataManifest).validate_python(data)
    except ValidationError as error:
        (first, *_) = error.errors()
        where = ".".join(map(str, first["loc"]))
        raise TPUValidationError(
            f"{name} is not a manifest of 'tpukit data prepare' ({where}: {first['msg']}); prepare "
            "the data again."
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, TPUValidationError):
            raise
        raise TPUValidationError(
            f"{name} is not a manifest of 'tpukit data prepare' ({error}); prepare the data again."
        ) from None
    parse_token_dtype(manifest.dtype)
    return manifest


def check_shards(
    manifest: DataManifest, shards: Sequence[TokenShard | None], *, folder: str
) -> tuple[TokenShard, ...]:
    """Compare shards, of which missing ones are None, with their manifest.

    Raises:
        TPUValidationError: A shard is missing, or differs from the manifest.
    """
    checked: list[TokenShard] = []
    for entry, shard in zip(manifest.shards, shards, strict=True):
        if shard is None:
            raise TPUValidationError(
                f"{folder}/{entry.file} is missing, one of {len(manifest.shards)} shards; copy "
                "the folder again."
            )
        if shard.num_tokens != entry.num_tokens or shard.dtype.name != manifest.dtype:
            raise TPUValidationError(
                f"{folder}/{entry.file} is corrupt: it has {shard.num_tokens} "
                f"{shard.dtype.name} tokens, but its manifest expects {entry.num_tokens} "
                f"{manifest.dtype}; copy or prepare it again."
            )
        checked.append(shard)
    return tuple(checked)


def check_documents(documents: np.ndarray, num_tokens: int, *, name: str) -> np.ndarray:
    """Refuse document offsets that do not belong to the tokens.

    Raises:
        TPUValidationError: They do not rise from 0 to the number of tokens.
    """
    fits = len(documents) > 0 and documents[0] == 0 and documents[-1] == num_tokens
    if not fits or bool((np.diff(documents.astype(np.int64)) < 0).any()):
        raise TPUValidationError(
            f"{name} does not fit its tokens: expected document offsets that rise from 0 to "
            f"{num_tokens}, the number of tokens. Prepare the data again."
        )
    return documents


def answers_checksum(answers: np.ndarray) -> str:
    """Return the checksum of the starts and ends of answers."""
    return hashlib.blake2b(answers.astype("<i8").tobytes(), digest_size=16).hexdigest()


def check_answers(answers: np.ndarray, manifest: DataManifest, *, name: str) -> np.ndarray:
    """Refuse starts and ends of answers that do not belong to the tokens.

    Raises:
        TPUValidationError: The checksum differs, or they do not rise within the tokens.
    """
    rising = bool((np.diff(answers) >= 0).all()) and len(answers) % 2 == 0
    within = not len(answers) or (answers[0] >= 0 and answers[-1] <= manifest.num_tokens)
    if not (rising and within) or answers_checksum(answers) != manifest.answers_blake2b:
        raise TPUValidationError(
            f"{name} differs from its manifest; copy or prepare the data again."
        )
    return answers


SHARD_TOKENS = 1 << 28


class TokenWriter:
    """Writes a prepared folder, which appears at `output` with `finish`.

    Several writers may have the same output, each with its own temporary folder; the first to
    finish wins. The temporary folder of a killed writer is removed by the next one on the same
    machine.

    Args:
        output: The folder to write.
        vocab_size: Decides whether tokens take 16 or 32 bits.
        tokenizer: Description of the tokenizer, for the manifest.
        shard_tokens: The most tokens per file.
        force: Replace a prepared folder at `output`.

    Raises:
        TPUValidationError: `output` exists already.
    """

    def __init__(
        self,
        output: Path,
        *,
        vocab_size: int | None,
        tokenizer: Mapping[str, Any],
        shard_tokens: int = SHARD_TOKENS,
        force: bool = False,
    ) -> None:
        self._output, self._force, self._shard_tokens = output, force, shard_tokens
        self._tokenizer = dict(tokenizer)
        narrow = vocab_size is not None and vocab_size <= 1 << 16
        self._dtype = np.dtype("<u2" if narrow else "<u4")
        self._shards: list[ShardEntry] = []
        self._documents = array("q", [0])  # compact: there may be hundreds of millions
        self._answers: array[int] | None = None
        self._smallest, self._largest = np.iinfo(np.int64).max, -1
        self._file: IO[bytes] | None = None
        self._in_shard = 0
        self._digest = hashlib.blake2b(digest_size=16)
        self.num_tokens = 0
        refuse_to_overwrite(output, force=force)
        self._stack = ExitStack()
        self._partial = self._stack.enter_context(folder_beside(output))

    @property
    def num_documents(self) -> int:
        """Number of documents so far."""
        return len(self._documents) - 1

    def __enter__(self) -> "TokenWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()
        self._stack.close()
        if isinstance(error, OSError):
            named = str(error.filename or self._partial)
            if not named.startswith(str(self._partial)):
                raise TPUValidationError(
                    f"{named} cannot be read ({error.strerror}); check its permissions."
                ) from error
            raise TPUValidationError(
                f"{self._output} cannot be written ({error.strerror}), and no part of it was kept. "
                "Choose another folder, or free space."
            ) from error

    def add(self, tokens: "np.ndarray | Sequence[int]", *, learned: bool | None = None) -> None:
        """Append tokens to the current document.

        Args:
            tokens: Token numbers.
            learned: Whether they are learned; None if all tokens of the folder are.

        Raises:
            TPUValidationError: A token number is too large for the stored dtype.
        """
        numbers = np.asarray(tokens)
        if not len(numbers):
            return
        if learned is not None and self._answers is None:
            self._answers = array("q")
        if learned and self._answers is not None:
            self._answers.extend((self.num_tokens, self.num_tokens + len(numbers)))
        smallest, largest = int(numbers.min()), int(numbers.max())
        if smallest < 0 or largest > np.iinfo(self._dtype).max:
            raise TPUValidationError(
                f"document {self.num_documents} contains the token "
                f"{smallest if smallest < 0 else largest}, but {self._dtype.name} goes from 0 to "
                f"{np.iinfo(self._dtype).max}; give a tokenizer with a larger vocab_size."
            )
        self._smallest, self._largest = min(self._smallest, smallest), max(self._largest, largest)
        left = numbers.astype(self._dtype)
        while len(left):
            file = self._file or self._open_shard()
            now, left = np.split(left, [self._shard_tokens - self._in_shard])
            content = now.tobytes()
            file.write(content)
            self._digest.update(content)
            self._in_shard += len(now)
            self.num_tokens += len(now)
            if self._in_shard == self._shard_tokens:
                self._close_shard()

    def end_document(self) -> None:
        """End the current document; the next token begins another one."""
        self._documents.append(self.num_tokens)

    def finish(self) -> DataManifest:
        """Close all files and move the folder to `output`.

        Raises:
            TPUValidationError: There are no tokens, or `output` exists meanwhile.
        """
        if self.num_tokens == 0:
            raise TPUValidationError(
                "the data contain no text, so there are no tokens to write; give other data."
            )
        if self._documents[-1] != self.num_tokens:
            self.end_document()
        if self._file is not None:
            self._close_shard()
        answers = None if self._answers is None else np.asarray(self._answers, np.int64)
        if answers is not None:
            np.save(self._partial / ANSWERS, answers)
        manifest = DataManifest(
            dtype=self._dtype.name,
            num_tokens=self.num_tokens,
            num_documents=self.num_documents,
            smallest_token=self._smallest,
            largest_token=self._largest,
            tokenizer=self._tokenizer,
            shards=tuple(self._shards),
            answers_blake2b=None if answers is None else answers_checksum(answers),
        )
        np.save(self._partial / DOCUMENTS, np.asarray(self._documents, np.int64))
        (self._partial / MANIFEST).write_text(manifest.to_json())
        refuse_to_overwrite(self._output, force=self._force)
        finish_folder(self._partial, self._output)
        return manifest

    def _open_shard(self) -> IO[bytes]:
        path = self._partial / f"tokens-{len(self._shards):05d}.npy"
        self._file = path.open("wb")
        _write_header(self._file, self._dtype, 0)
        self._in_shard = 0
        self._digest = hashlib.blake2b(digest_size=16)
        return self._file

    def _close_shard(self) -> None:
        file = self._file
        if file is None:
            return
        # numpy pads its header, so the length can be written afterwards.
        file.seek(0)
        _write_header(file, self._dtype, self._in_shard)
        file.flush()
        os.fsync(file.fileno())
        file.close()
        name = Path(file.name).name
        entry = ShardEntry(file=name, num_tokens=self._in_shard, blake2b=self._digest.hexdigest())
        self._shards.append(entry)
        self._file = None


def refuse_to_overwrite(output: Path, *, force: bool) -> None:
    """Refuse an output that exists, unless it is prepared data and `force` is set.

    Raises:
        TPUValidationError: The output exists.
    """
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not (output / MANIFEST).is_file():
        raise TPUValidationError(
            f"{output} exists and is not prepared data, so it is not replaced; choose another "
            "folder."
        )
    if not force:
        raise TPUValidationError(
            f"{output} contains prepared data already; use --force (force=True) to replace them."
        )


def _write_header(file: IO[bytes], dtype: np.dtype[Any], count: int) -> None:
    np.lib.format.write_array_header_1_0(
        file,
        {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)},
    )

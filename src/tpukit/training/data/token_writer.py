"""Token shards written beside their place and moved there whole."""

import hashlib
import os
from array import array
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from ...errors import TPUValidationError
from ...runtime.files import finish_folder, folder_beside
from .manifest import ANSWERS, DOCUMENTS, MANIFEST, DataManifest, ShardEntry, answers_checksum

SHARD_TOKENS = 1 << 28


class TokenWriter:
    """Writes a prepared folder; nothing is at `output` before `finish`.

    Several may write to the same place at once, each in a folder of its own; the first to finish
    wins. What one leaves behind when it is killed, the next one on the same machine removes.

    Args:
        output: The folder to make.
        vocab_size: Decides how wide tokens are stored.
        tokenizer: Written into the manifest.
        shard_tokens: Tokens in a file at most.
        force: Replace a prepared folder that is there.

    Raises:
        TPUValidationError: There is something at `output` already.
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
        self._documents = array("q", [0])  # there may be hundreds of millions
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
        """Documents ended so far."""
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
                raise TPUValidationError(f"{named} cannot be read ({error.strerror}).") from error
            raise TPUValidationError(
                f"{self._output} cannot be written ({error.strerror}); nothing was left behind. "
                "Choose another place, or make room."
            ) from error

    def add(self, tokens: "np.ndarray | Sequence[int]", *, learnt: bool | None = None) -> None:
        """Append tokens to the current document.

        Args:
            tokens: Their numbers.
            learnt: Whether they are to be predicted; None where all tokens are.

        Raises:
            TPUValidationError: A token number does not fit in what is stored.
        """
        found = np.asarray(tokens)
        if not len(found):
            return
        if learnt is not None and self._answers is None:
            self._answers = array("q")
        if learnt and self._answers is not None:
            self._answers.extend((self.num_tokens, self.num_tokens + len(found)))
        smallest, largest = int(found.min()), int(found.max())
        if smallest < 0 or largest > np.iinfo(self._dtype).max:
            raise TPUValidationError(
                f"document {self.num_documents} holds the token "
                f"{smallest if smallest < 0 else largest}, and {self._dtype.name} goes from 0 to "
                f"{np.iinfo(self._dtype).max}; the tokenizer's vocab_size is too small for it."
            )
        self._smallest, self._largest = min(self._smallest, smallest), max(self._largest, largest)
        left = found.astype(self._dtype)
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
        """What comes next belongs to another document."""
        self._documents.append(self.num_tokens)

    def finish(self) -> DataManifest:
        """Close everything and move the folder into place.

        Raises:
            TPUValidationError: There are no tokens, or somebody else made the folder meanwhile.
        """
        if self.num_tokens == 0:
            raise TPUValidationError("the data hold no text, so there are no tokens to write.")
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
        # numpy pads its header so that the length can be filled in afterwards.
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
    """Leave what is there alone, unless it is prepared data that may be replaced.

    Raises:
        TPUValidationError: It is in the way.
    """
    if not output.exists() or (output.is_dir() and not any(output.iterdir())):
        return
    if not (output / MANIFEST).is_file():
        raise TPUValidationError(
            f"{output} is there and does not hold prepared data, so it is left alone; choose "
            "another place."
        )
    if not force:
        raise TPUValidationError(
            f"{output} holds prepared data already; say --force (force=True) to replace them."
        )


def _write_header(file: IO[bytes], dtype: np.dtype[Any], count: int) -> None:
    np.lib.format.write_array_header_1_0(
        file,
        {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (count,)},
    )

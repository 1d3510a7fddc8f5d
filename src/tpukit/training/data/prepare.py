"""`tpukit data prepare`: tokenizes text into a folder of tokens."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from ...errors import ConfigError, TPUValidationError
from ...runtime.progress import Counted, Progress, silent
from ...shown import Shown
from .chat import WrittenConversations, messages_key, template_of, write_conversations
from .documents import DocumentPiece, read_documents
from .locations import TEXT_KINDS, DataKind, kind_of, open_location
from .remote import remote_url
from .token_folder import (
    MANIFEST,
    SHARD_TOKENS,
    DataManifest,
    TokenWriter,
    read_manifest,
    refuse_to_overwrite,
)
from .tokenizer import (
    Tokenizer,
    keep_generation_config,
    keep_tokenizer,
    load_tokenizer,
    start_of_document,
    tokenizer_key,
)

_BATCH_PIECES, _BATCH_CHARACTERS = 1024, 1 << 22


@dataclass(frozen=True, kw_only=True)
class Prepared(Shown):
    """A folder of tokens that was written.

    Attributes:
        answers_not_learnt: Answers of conversations that are not learned, because the template
            changes them when messages follow.
    """

    folder: str
    num_tokens: int
    num_documents: int
    largest_token: int
    dtype: str
    shards: int
    tokenizer: str
    answers_not_learnt: int | None = None

    def __rich__(self) -> Table:
        table = Table(title=f"prepared: {self.folder}", show_header=False, title_justify="left")
        table.add_row("tokens", f"{self.num_tokens:,}")
        table.add_row("documents", f"{self.num_documents:,}")
        table.add_row("largest token", f"{self.largest_token:,}")
        table.add_row("stored as", f"{self.dtype}, shards: {self.shards}")
        table.add_row("tokenizer", self.tokenizer)
        if self.answers_not_learnt:
            table.add_row(
                "answers not learned", f"{self.answers_not_learnt:,}: the template changes"
            )
            table.add_row("", "them when messages follow")
        return table


def prepare_tokens(
    source: str | Path,
    output: str | Path,
    *,
    tokenizer: str | Path | Tokenizer | None,
    end: str | None = None,
    text_key: str = "text",
    shard_tokens: int = SHARD_TOKENS,
    force: bool = False,
    exist_ok: bool = False,
    chat: bool = False,
    progress: Progress = silent,
) -> Prepared:
    """Tokenize text into a folder.

    The folder appears only when it is complete; after an interruption, start again.

    Args:
        source: Text (.txt: a file is a document), .jsonl, ArrayRecord, a Hugging Face data set
            on disk, a folder of one of these, or the same at gs://….
        output: The folder to write.
        tokenizer: See `load_tokenizer`; None if documents are token numbers already.
        end: The token that ends a document, if the tokenizer does not define it.
        text_key: The field with the text or token numbers, for records with fields.
        shard_tokens: The most tokens per file.
        force: Replace prepared data at `output`.
        exist_ok: Use prepared data at `output`, also if another process writes them meanwhile.
        chat: Lines of JSON are conversations (field "messages", or `text_key`). The tokenizer's
            chat template formats them, and only answers are learned.
        progress: Called from time to time with a `Counted` line of bytes.

    Raises:
        TPUValidationError: The data cannot be read, or `output` exists already.
        ConfigError: The tokenizer is missing.
    """
    if remote_url(output) is not None:
        raise ConfigError(
            f"the output must be a local folder, not {output}; copy it there afterwards with "
            "'gcloud storage cp -r'."
        )
    output = Path(output).expanduser()
    if not exist_ok:
        refuse_to_overwrite(output, force=force)
    elif (output / MANIFEST).is_file():
        return _prepared(output, _read_manifest(output))
    location = open_location(source)
    kind = kind_of(location)
    if kind.name not in TEXT_KINDS:
        raise ConfigError(f"{location.path} contains tokens already; train on it directly.")
    if chat and kind.name != "jsonl":
        raise ConfigError(
            f"{location.path} is {kind.name.replace('_', ' ')}; conversations are lines of JSON "
            "(.jsonl) with a list of messages in each."
        )
    template = template_of(tokenizer) if chat else None
    encoder = None if tokenizer is None else load_tokenizer(tokenizer, end=end)
    written: WrittenConversations | None = None
    writer = TokenWriter(
        output,
        vocab_size=None if encoder is None else encoder.vocab_size,
        tokenizer={} if encoder is None else _about(encoder),
        shard_tokens=shard_tokens,
        force=force,
    )
    with writer, location.local(kind.files) as paths:
        if template is not None and encoder is not None:
            key = messages_key(text_key)
            written = write_conversations(writer, paths, encoder, template, key, progress)
        else:
            _write_all(writer, paths, kind, encoder, text_key, progress)
        try:
            manifest = writer.finish()
        except (TPUValidationError, OSError):
            # Another process may have written the same folder meanwhile.
            if not (exist_ok and (output / MANIFEST).is_file()):
                raise
            manifest = _read_manifest(output)
    if isinstance(tokenizer, str | Path):  # so that a run on these data can generate text
        keep_tokenizer(tokenizer, output)
    if written is None:
        return _prepared(output, manifest)
    keep_generation_config(None, output, written.ends)
    return dataclasses.replace(
        _prepared(output, manifest), answers_not_learnt=written.skipped_answers
    )


def _read_manifest(folder: Path) -> DataManifest:
    return read_manifest((folder / MANIFEST).read_bytes(), name=str(folder / MANIFEST))


def _prepared(folder: Path, manifest: DataManifest) -> Prepared:
    return Prepared(
        folder=str(folder),
        num_tokens=manifest.num_tokens,
        num_documents=manifest.num_documents,
        largest_token=manifest.largest_token,
        dtype=manifest.dtype,
        shards=len(manifest.shards),
        tokenizer=manifest.tokenizer.get("name", "none: the input was token numbers"),
    )


def _write_all(
    writer: TokenWriter,
    paths: list[Path],
    kind: DataKind,
    tokenizer: Tokenizer | None,
    text_key: str,
    progress: Progress,
) -> None:
    total = sum(path.stat().st_size for path in paths)
    if kind.name == "huggingface":
        paths = [paths[0].parent]
    done, begins = 0, True
    starts = () if tokenizer is None else start_of_document(tokenizer)
    for batch in _batched(read_documents(kind.name, paths, text_key=text_key)):
        for tokens, piece in zip(_encode(batch, tokenizer), batch, strict=True):
            if begins and len(tokens) and isinstance(piece.content, str):
                writer.add(starts)
            writer.add(tokens)
            begins = piece.ends or (begins and not len(tokens))
            done += piece.size_bytes
            if piece.ends:
                if tokenizer is not None and tokenizer.end_of_document is not None:
                    _end(writer, piece, tokenizer.end_of_document)
                writer.end_document()
        progress(Counted(f"{writer.num_tokens:,} tokens", done=done, total=total))


def _end(writer: TokenWriter, piece: DocumentPiece, token: int) -> None:
    """Add the end token after text; token numbers have it already, or leave it out on purpose."""
    if isinstance(piece.content, str):
        writer.add([token])


def _encode(batch: list[DocumentPiece], tokenizer: Tokenizer | None) -> Iterator[np.ndarray]:
    texts = [piece.content for piece in batch if isinstance(piece.content, str)]
    if texts and tokenizer is None:
        raise ConfigError(
            "the data are text, which needs a tokenizer: 'bytes', or the path of a "
            "tokenizer.json (--tokenizer)."
        )
    encoded = iter(tokenizer.encode_batch(texts) if tokenizer is not None and texts else ())
    for piece in batch:
        yield next(encoded) if isinstance(piece.content, str) else np.asarray(piece.content)


def _batched(pieces: Iterator[DocumentPiece]) -> Iterator[list[DocumentPiece]]:
    """Yield batches large enough for a tokenizer to use all cores."""
    batch: list[DocumentPiece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.content)
        if len(batch) >= _BATCH_PIECES or characters >= _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _about(tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "name": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "end_of_document": tokenizer.end_of_document,
        "key": tokenizer_key(tokenizer),
    }

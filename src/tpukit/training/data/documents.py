"""Documents out of text files, JSON lines, ArrayRecord files and Hugging Face data sets."""

import gzip
import zlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from ...errors import MissingExtraError, TPUValidationError, did_you_mean
from ...plain_data import MOST_BYTES, parse_json
from .tf_example import read_example

_PIECE_CHARACTERS = 1 << 20
_RECORDS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class DocumentPiece:
    """A document, or a part of a long one; text, or token numbers where somebody made them.

    Attributes:
        content: Text or token numbers.
        ends: Whether the document ends with it.
        size_bytes: What it took in its file, for progress; 0 where nobody knows.
    """

    content: str | Sequence[int]
    ends: bool = True
    size_bytes: int = 0


def read_documents(kind: str, paths: Sequence[Path], *, text_key: str) -> Iterator[DocumentPiece]:
    """All documents of the files, in order.

    Args:
        kind: "text" (a file is a document), "jsonl", "array_record" or "huggingface".
        paths: Files; for "huggingface" the folders.
        text_key: Where records have fields: the one with the text or the token numbers.

    Raises:
        TPUValidationError: A line or record cannot be read; the message says which.
    """
    reader = {
        "text": _text,
        "jsonl": _json_lines,
        "array_record": _array_record,
        "huggingface": _huggingface,
    }[kind]
    for path in paths:
        yield from reader(path, text_key)


def _text(path: Path, text_key: str) -> Generator[DocumentPiece]:
    """The file as one document, in pieces that end with a line."""
    del text_key
    held: list[str] = []
    held_characters = 0
    for number, line in enumerate(_lines(path), 1):
        try:
            held.append(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise _no_utf8(path, number, error) from None
        held_characters += len(held[-1])
        if held_characters >= _PIECE_CHARACTERS:
            yield DocumentPiece("".join(held), ends=False, size_bytes=held_characters)
            held, held_characters = [], 0
    yield DocumentPiece("".join(held), size_bytes=held_characters)


def _json_lines(path: Path, text_key: str) -> Generator[DocumentPiece]:
    for record, where, size in json_records(path):
        yield DocumentPiece(_content(record, text_key, where), size_bytes=size)


def json_records(path: Path) -> Generator[tuple[Any, str, int]]:
    """Every line of JSON of a file, where it stands, and its bytes.

    Raises:
        TPUValidationError: A line is no JSON.
    """
    for number, line in enumerate(_lines(path, MOST_BYTES + 1), 1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            record = parse_json(line, is_record=True)
        except UnicodeDecodeError as error:
            raise _no_utf8(path, number, error) from None
        except ValueError as error:
            raise TPUValidationError(
                f"{where} is no JSON ({error}); mend or remove the line."
            ) from None
        yield record, where, len(line)


def _array_record(path: Path, text_key: str) -> Generator[DocumentPiece]:
    """A record is a JSON object, a tf.train.Example, or plain text."""
    try:
        from array_record.python.array_record_module import ArrayRecordReader
    except ImportError:
        raise MissingExtraError("data", needed_for=str(path), module="array_record") from None
    try:
        reader = ArrayRecordReader(str(path))
        if not reader.ok():  # it says so instead of raising, and then counts 0 records
            raise ValueError("its footer cannot be read")
        count = reader.num_records()
        for first in range(0, count, _RECORDS_AT_ONCE):
            records = reader.read(first, min(first + _RECORDS_AT_ONCE, count))
            for number, record in enumerate(records, first):
                where = f"{path} record {number}"
                yield DocumentPiece(
                    _record_content(record, text_key, where), size_bytes=len(record)
                )
    except (RuntimeError, ValueError, IndexError) as error:
        if isinstance(error, TPUValidationError):
            raise
        raise TPUValidationError(
            f"{path} is corrupt, or no ArrayRecord file: {error}. Copy it again."
        ) from None


def _huggingface(path: Path, text_key: str) -> Generator[DocumentPiece]:
    try:
        import datasets
    except ImportError:
        raise MissingExtraError("data", needed_for=str(path), module="datasets") from None
    try:
        found: Any = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError) as error:  # pyarrow's own are ValueErrors
        raise TPUValidationError(
            f"{path} cannot be opened as a Hugging Face data set: {error}. Copy or save it again."
        ) from None
    key = text_key
    if key not in found.column_names:
        key = "input_ids" if "input_ids" in found.column_names else text_key
    if key not in found.column_names:
        raise _no_field(str(path), text_key, found.column_names)
    for batch in found.select_columns([key]).iter(batch_size=_RECORDS_AT_ONCE):
        for value in batch[key]:
            content = _content({key: value}, key, str(path))
            yield DocumentPiece(content, size_bytes=len(content))


def _record_content(record: bytes, text_key: str, where: str) -> "str | Sequence[int]":
    if record.startswith(b"{"):
        try:
            return _content(parse_json(record, is_record=True), text_key, where)
        except UnicodeDecodeError:
            pass
        except ValueError as error:
            if isinstance(error, TPUValidationError):
                raise
            raise TPUValidationError(f"{where} is no JSON ({error}).") from None
    example = read_example(record)
    if example is not None:
        value = example.get(text_key)
        if isinstance(value, list) and len(value) == 1 and isinstance(value[0], bytes):
            value = value[0].decode("utf-8", errors="replace")
        fields = example if value is None else {**example, text_key: value}
        return _content(fields, text_key, where)
    try:
        return record.decode("utf-8")
    except UnicodeDecodeError:
        raise TPUValidationError(
            f"{where} is neither JSON, nor a tf.train.Example, nor UTF-8 text."
        ) from None


def _content(record: Any, text_key: str, where: str) -> "str | Sequence[int]":
    """The text or the token numbers of a record."""
    if isinstance(record, str):
        return record
    if not isinstance(record, dict):
        raise TPUValidationError(
            f"{where} is a {type(record).__name__}; expected an object with a field '{text_key}', "
            "or a string."
        )
    fields = cast("dict[str, Any]", record)
    value = fields.get(text_key)
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(type(token) is int for token in cast("list[Any]", value)):
        return cast("list[int]", value)
    if value is None:
        raise _no_field(where, text_key, fields)
    raise TPUValidationError(
        f"{where}: field '{text_key}' is a {type(value).__name__}; expected text or a list of "
        "token numbers."
    )


def _no_field(where: str, text_key: str, known: Iterable[str]) -> TPUValidationError:
    names = [str(name) for name in known]
    return TPUValidationError(
        f"{where} has no field '{text_key}', only {', '.join(names) or 'none'}; name it with "
        f"text_key (--text-key).{did_you_mean(text_key, names)}"
    )


def _no_utf8(path: Path, number: int, error: UnicodeDecodeError) -> TPUValidationError:
    return TPUValidationError(
        f"{path} line {number} is not UTF-8 ({error.reason}); convert the file with iconv."
    )


def _lines(path: Path, longest: int = -1) -> Generator[bytes]:
    start = gzip.open if path.suffix == ".gz" else open
    with cast("IO[bytes]", start(path, "rb")) as file:
        try:
            while line := file.readline(longest):
                yield line
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise TPUValidationError(f"{path} is corrupt ({error}); copy it again.") from None

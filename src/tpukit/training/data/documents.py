"""Documents of text files, JSON lines, ArrayRecord files and Hugging Face data sets."""

import gzip
import zlib
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, cast

from ...errors import MissingExtraError, TPUValidationError, did_you_mean
from ...plain_data import MOST_BYTES, parse_json

_PIECE_CHARACTERS = 1 << 20
_RECORDS_AT_ONCE = 1024


@dataclass(frozen=True, slots=True)
class DocumentPiece:
    """A document or a part of a long one, as text or token numbers.

    Attributes:
        content: Text or token numbers.
        ends: Whether it is the end of the document.
        size_bytes: Its size in the file, for progress; 0 if unknown.
    """

    content: str | Sequence[int]
    ends: bool = True
    size_bytes: int = 0


def read_documents(kind: str, paths: Sequence[Path], *, text_key: str) -> Iterator[DocumentPiece]:
    """Yield all documents of the files, in order.

    Args:
        kind: "text" (a file is a document), "jsonl", "array_record" or "huggingface".
        paths: Files; for "huggingface" the folders.
        text_key: The field with the text or the token numbers, for records with fields.

    Raises:
        TPUValidationError: A line or record cannot be read; the message names it.
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
    """Yield a file as one document, in pieces that end at a line break."""
    del text_key
    lines: list[str] = []
    characters = 0
    for number, line in enumerate(_lines(path), 1):
        try:
            lines.append(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise _not_utf8(path, number, error) from None
        characters += len(lines[-1])
        if characters >= _PIECE_CHARACTERS:
            yield DocumentPiece("".join(lines), ends=False, size_bytes=characters)
            lines, characters = [], 0
    yield DocumentPiece("".join(lines), size_bytes=characters)


def _json_lines(path: Path, text_key: str) -> Generator[DocumentPiece]:
    for record, where, size in json_records(path):
        yield DocumentPiece(_content(record, text_key, where), size_bytes=size)


def json_records(path: Path) -> Generator[tuple[Any, str, int]]:
    """Yield each JSON line of a file: value, "file line n" for messages, and size in bytes.

    Raises:
        TPUValidationError: A line is not JSON.
    """
    for number, line in enumerate(_lines(path, MOST_BYTES + 1), 1):
        if not line.strip():
            continue
        where = f"{path} line {number}"
        try:
            record = parse_json(line, is_record=True)
        except UnicodeDecodeError as error:
            raise _not_utf8(path, number, error) from None
        except ValueError as error:
            raise TPUValidationError(
                f"{where} is not JSON ({error}); fix or remove the line."
            ) from None
        yield record, where, len(line)


def _array_record(path: Path, text_key: str) -> Generator[DocumentPiece]:
    """Yield records, each a JSON object, a tf.train.Example, or plain text."""
    try:
        from array_record.python.array_record_module import ArrayRecordReader
    except ImportError:
        raise MissingExtraError("data", needed_for=str(path), module="array_record") from None
    try:
        reader = ArrayRecordReader(str(path))
        if not reader.ok():  # it does not raise, and would count 0 records
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
            f"{path} is corrupt, or not an ArrayRecord file: {error}. Copy it again."
        ) from None


def _huggingface(path: Path, text_key: str) -> Generator[DocumentPiece]:
    try:
        import datasets
    except ImportError:
        raise MissingExtraError("data", needed_for=str(path), module="datasets") from None
    try:
        data_set: Any = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError) as error:  # pyarrow raises ValueErrors
        raise TPUValidationError(
            f"{path} cannot be opened as a Hugging Face data set: {error}. Copy or save it again."
        ) from None
    key = text_key
    if key not in data_set.column_names:
        key = "input_ids" if "input_ids" in data_set.column_names else text_key
    if key not in data_set.column_names:
        raise _no_field(str(path), text_key, data_set.column_names)
    for batch in data_set.select_columns([key]).iter(batch_size=_RECORDS_AT_ONCE):
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
            raise TPUValidationError(f"{where} is not JSON ({error}); fix it.") from None
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
            f"{where} is not JSON, a tf.train.Example, or UTF-8 text; expected one of them."
        ) from None


def _content(record: Any, text_key: str, where: str) -> "str | Sequence[int]":
    """Return the text or the token numbers of a record."""
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
        f"{where} has no field '{text_key}', only {', '.join(names) or 'none'}; give the field's "
        f"name with text_key (--text-key).{did_you_mean(text_key, names)}"
    )


def _not_utf8(path: Path, number: int, error: UnicodeDecodeError) -> TPUValidationError:
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


# Of tensorflow/core/example/{example,feature}.proto: an Example has `features` (field 1), a map
# from names to a Feature: bytes_list (1), float_list (2) or int64_list (3).
_VARINT, _LENGTH = 0, 2
_BYTES_LIST, _INT64_LIST = 1, 3


def read_example(record: bytes) -> dict[str, list[bytes] | list[int]] | None:
    """Return the byte and integer features of a tf.train.Example; None for other records."""
    try:
        values: dict[str, list[bytes] | list[int]] = {}
        for number, features in _fields(record):
            if number != 1 or not isinstance(features, bytes):
                return None
            for _, entry in _fields(features):
                if not isinstance(entry, bytes):
                    return None
                name, feature = _entry(entry)
                if feature is not None:
                    values[name] = feature
    except (IndexError, UnicodeDecodeError, ValueError):
        return None
    return values or None


def _entry(entry: bytes) -> tuple[str, list[bytes] | list[int] | None]:
    """Return the name and values of one feature; None instead of float values."""
    parts = dict(_fields(entry))
    name, feature = parts.get(1), parts.get(2, b"")
    if not isinstance(name, bytes) or not isinstance(feature, bytes):
        raise ValueError("not a map entry")
    for kind, values in _fields(feature):
        if not isinstance(values, bytes):
            raise ValueError("not a feature list")
        if kind == _BYTES_LIST:
            texts = [value for _, value in _fields(values) if isinstance(value, bytes)]
            return name.decode(), texts
        if kind == _INT64_LIST:
            return name.decode(), list(_integers(values))
    return name.decode(), None


def _integers(values: bytes) -> Iterator[int]:
    """Yield integers that may be packed or not."""
    for _, value in _fields(values):
        if isinstance(value, int):
            yield _signed(value)
            continue
        position = 0
        while position < len(value):
            number, position = _varint(value, position)
            yield _signed(number)


def _fields(message: bytes) -> Iterator[tuple[int, bytes | int]]:
    position = 0
    while position < len(message):
        key, position = _varint(message, position)
        if key & 7 == _VARINT:
            value, position = _varint(message, position)
            yield key >> 3, value
        elif key & 7 == _LENGTH:
            length, position = _varint(message, position)
            if position + length > len(message):
                raise ValueError("cut short")
            yield key >> 3, message[position : position + length]
            position += length
        else:
            raise ValueError("not a field of an Example")


def _varint(message: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value

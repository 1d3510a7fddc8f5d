"""Read the protobuf schemas that jaxlib and libtpu carry inside their shared libraries.

Only what the flag registry needs: the fields of one message by name. A full protobuf runtime would
be a dependency for a hundred lines of work.
"""

from dataclasses import dataclass
from typing import Protocol

from ..protobuf_wire import iter_fields, read_varint

# Field numbers of google/protobuf/descriptor.proto, frozen since protobuf was published.
MESSAGE_FIELD, MESSAGE_ENUM = 2, 4
FIELD_NAME, FIELD_NUMBER, FIELD_LABEL, FIELD_TYPE, FIELD_TYPE_NAME = 1, 3, 4, 5, 6
ENUM_NAME, ENUM_VALUE, VALUE_NAME, VALUE_NUMBER = 1, 2, 1, 2
LABEL_REPEATED = 3
MESSAGE_OF_FILE_TAG = 0x22  # field 4 of FileDescriptorProto, length-delimited
LONGEST_LENGTH_BYTES = 5


class Bytes(Protocol):
    """What `find_message` needs of a file: a memory map or plain bytes."""

    def find(self, sub: bytes, start: int = ..., /) -> int:
        """The first position of `sub` at or after `start`, or -1."""
        ...

    def __getitem__(self, index: slice, /) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a message: its number and its protobuf type number."""

    name: str
    number: int
    type: int
    repeated: bool
    enum_names: tuple[tuple[int, str], ...]  # of an enum nested in the same message


def find_message(library: Bytes, name: str) -> dict[str, Field] | None:
    """Return the fields of top-level message `name`, or None if no schema of it is inside."""
    needle = b"\n" + bytes([len(name)]) + name.encode()
    at = library.find(needle)
    while at >= 0:
        size = _length_before(library, at)
        if size is not None:
            try:
                return _read_message(library[at : at + size])
            except (ValueError, UnicodeDecodeError):
                pass  # the same bytes by chance; look further
        at = library.find(needle, at + 1)
    return None


def _length_before(library: Bytes, at: int) -> int | None:
    """The length prefix that ends right before `at`, if a message of a file starts there."""
    before = library[max(0, at - LONGEST_LENGTH_BYTES - 1) : at]
    for start in range(len(before) - 2, -1, -1):
        if before[start] != MESSAGE_OF_FILE_TAG:
            continue
        try:
            size, end = read_varint(before, start + 1)
        except ValueError:
            continue
        if end == len(before):
            return size
    return None


def _read_message(data: bytes) -> dict[str, Field]:
    enums: dict[str, tuple[tuple[int, str], ...]] = {}
    raw_fields: list[dict[int, int | bytes]] = []
    for number, value in iter_fields(data):
        if number == MESSAGE_ENUM and isinstance(value, bytes):
            enum_name, values = _read_enum(value)
            enums[enum_name] = values
        elif number == MESSAGE_FIELD and isinstance(value, bytes):
            raw_fields.append(dict(iter_fields(value)))
    fields: dict[str, Field] = {}
    for raw in raw_fields:
        name = _text(raw[FIELD_NAME])
        type_name = _text(raw.get(FIELD_TYPE_NAME, b"")).rpartition(".")[2]
        fields[name] = Field(
            name=name,
            number=_number(raw[FIELD_NUMBER]),
            type=_number(raw.get(FIELD_TYPE, 0)),
            repeated=raw.get(FIELD_LABEL) == LABEL_REPEATED,
            enum_names=enums.get(type_name, ()),
        )
    return fields


def _read_enum(data: bytes) -> tuple[str, tuple[tuple[int, str], ...]]:
    name, values = "", list[tuple[int, str]]()
    for number, value in iter_fields(data):
        if not isinstance(value, bytes):
            continue
        if number == ENUM_NAME:
            name = _text(value)
        elif number == ENUM_VALUE:
            entry = dict(iter_fields(value))
            values.append((_number(entry.get(VALUE_NUMBER, 0)), _text(entry[VALUE_NAME])))
    return name, tuple(values)


def _text(value: int | bytes) -> str:
    if not isinstance(value, bytes):
        raise ValueError("a name was expected, a number was found")
    return value.decode()


def _number(value: int | bytes) -> int:
    if not isinstance(value, int):
        raise ValueError("a number was expected, bytes were found")
    return value

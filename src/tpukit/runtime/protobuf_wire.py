"""Read serialized protocol buffers without their schemas: field numbers and raw contents.

A wire format that has not changed since 2008; a protobuf runtime and generated classes would be a
dependency for forty lines of work.
"""

from collections.abc import Iterator

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5
_LAST_SHIFT = 63


def iter_fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (field number, value) of a serialized message, in order.

    Raises:
        ValueError: `data` is not a protobuf message.
    """
    at = 0
    while at < len(data):
        key, at = read_varint(data, at)
        number, kind = key >> 3, key & 7
        if kind == VARINT:
            value, at = read_varint(data, at)
            yield number, value
            continue
        if kind == BYTES:
            size, at = read_varint(data, at)
        elif kind in (FIXED32, FIXED64):
            size = 4 if kind == FIXED32 else 8
        else:
            raise ValueError(f"wire type {kind} at byte {at} is not protobuf")
        if at + size > len(data):
            raise ValueError(f"field {number} runs past the end of the message")
        yield number, data[at : at + size]
        at += size


def iter_packed(data: bytes) -> Iterator[int]:
    """Yield numbers that were written one after another without keys.

    Raises:
        ValueError: The last one is cut short.
    """
    at = 0
    while at < len(data):
        value, at = read_varint(data, at)
        yield value


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number that begins at a byte, and where the next thing begins.

    Raises:
        ValueError: It does not end within the message, or within 64 bits.
    """
    value = shift = 0
    while True:
        if at >= len(data) or shift > _LAST_SHIFT:
            raise ValueError("a number runs past the end of the message")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
        shift += 7

"""Read serialized protocol buffers without their schemas: field numbers and raw contents."""

from collections.abc import Iterator

from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

_LAST_SHIFT = 63


def iter_fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield (field number, value) of a serialized message, in order.

    Raises:
        ValueError: `data` is not a protobuf message.
    """
    try:
        message = Empty.FromString(data)
    except DecodeError as error:
        raise ValueError(f"not a protobuf message: {error}") from None
    for field in UnknownFieldSet(message):
        if not isinstance(field.data, (int, bytes)):
            raise ValueError(f"field {field.field_number} is a group, which no message here has")
        yield field.field_number, field.data


def iter_packed(data: bytes) -> Iterator[int]:
    """Yield the numbers of a packed field.

    Raises:
        ValueError: The last number is cut short.
    """
    at = 0
    while at < len(data):
        value, at = read_varint(data, at)
        yield value


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number that begins at a byte, and the position after it.

    Raises:
        ValueError: The number does not end within the message, or within 64 bits.
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

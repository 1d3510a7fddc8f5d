"""The one protocol buffer that training data come in, tf.train.Example, without TensorFlow.

An Example holds `features` (field 1), which maps names to a Feature: bytes_list (1), float_list
(2) or int64_list (3). Source: tensorflow/core/example/{example,feature}.proto.
"""

from collections.abc import Iterator

_VARINT, _LENGTH = 0, 2
_BYTES_LIST, _INT64_LIST = 1, 3


def read_example(record: bytes) -> dict[str, list[bytes] | list[int]] | None:
    """The byte and integer features of a record, or None when it is no Example."""
    try:
        found: dict[str, list[bytes] | list[int]] = {}
        for number, features in _fields(record):
            if number != 1 or not isinstance(features, bytes):
                return None
            for _, entry in _fields(features):
                if not isinstance(entry, bytes):
                    return None
                name, feature = _entry(entry)
                if feature is not None:
                    found[name] = feature
    except (IndexError, UnicodeDecodeError, ValueError):
        return None
    return found or None


def _entry(entry: bytes) -> tuple[str, list[bytes] | list[int] | None]:
    """Name and values of one feature; None for floats."""
    parts = dict(_fields(entry))
    name, feature = parts.get(1), parts.get(2, b"")
    if not isinstance(name, bytes) or not isinstance(feature, bytes):
        raise ValueError("no entry of a map")
    for kind, values in _fields(feature):
        if not isinstance(values, bytes):
            raise ValueError("no list of a feature")
        if kind == _BYTES_LIST:
            texts = [value for _, value in _fields(values) if isinstance(value, bytes)]
            return name.decode(), texts
        if kind == _INT64_LIST:
            return name.decode(), list(_integers(values))
    return name.decode(), None


def _integers(values: bytes) -> Iterator[int]:
    """Packed or not: writers may do either."""
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
            raise ValueError("no field of an Example")


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

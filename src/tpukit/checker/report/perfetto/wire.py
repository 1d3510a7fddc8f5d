"""Protocol-buffer wire format, the three kinds of field a trace needs.

Thirty lines of a format frozen since 2008 cost less than a dependency on a package whose versions
libtpu, TensorFlow and cloud clients already fight over.
"""

import struct

_VARINT, _FIXED64, _LENGTH = 0, 1, 2


def varint(value: int) -> bytes:
    """An integer in groups of seven bits, the lowest first; a negative one as 64 bits."""
    value &= 2**64 - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def number(field: int, value: int) -> bytes:
    """An integer or enumeration field."""
    return varint(field << 3 | _VARINT) + varint(value)


def real(field: int, value: float) -> bytes:
    """A double field."""
    return varint(field << 3 | _FIXED64) + struct.pack("<d", value)


def block(field: int, value: bytes) -> bytes:
    """A field that holds a message."""
    return varint(field << 3 | _LENGTH) + varint(len(value)) + value


def text(field: int, value: str) -> bytes:
    """A string field; what is no Unicode becomes a replacement character."""
    return block(field, value.encode("utf-8", errors="replace"))

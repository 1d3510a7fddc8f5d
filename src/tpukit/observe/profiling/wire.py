"""The programs inside an xplane file: what `jax.profiler.ProfileData` leaves out of it.

An xplane file is a protocol buffer (tsl/profiler/protobuf/xplane.proto). Planes, lines and events
are read by jax's own `ProfileData`. The programs that ran lie in the metadata of a plane that has
no events, which that class does not show; XProf shows them and is an optional dependency. Thirty
lines of a wire format that has not changed since 2008 read them on every machine with jax.
"""

from collections.abc import Iterator

from ...errors import TPUValidationError

METADATA_PLANE = b"/host:metadata"
# Field numbers, which a published protocol buffer never changes.
PLANES = 1  # of XSpace
PLANE_NAME, EVENT_METADATA = 2, 4  # of XPlane
VALUE = 2  # of an entry of a map
NAME, STATS = 2, 5  # of XEventMetadata
BYTES = 6  # of XStat
HLO_MODULE = 1  # of HloProto
_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_LONGEST_VARINT = 10


def programs_in(content: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the name (`jit_step(7)`: module and number) and HloModuleProto of every program.

    Raises:
        TPUValidationError: The bytes are cut short or no protocol buffer.
    """
    for number, plane in fields(content):
        if number != PLANES or not isinstance(plane, bytes):
            continue
        parts = list(fields(plane))
        if (PLANE_NAME, METADATA_PLANE) not in parts:
            continue
        for number, entry in parts:
            if number == EVENT_METADATA and isinstance(entry, bytes):
                yield from _program(entry)


def _program(entry: bytes) -> Iterator[tuple[str, bytes]]:
    about = list(fields(_only(entry, VALUE)))
    name = next((value for number, value in about if number == NAME), b"")
    for number, stat in about:
        if number != STATS or not isinstance(stat, bytes):
            continue
        module = _only(_only(stat, BYTES), HLO_MODULE)
        if module and isinstance(name, bytes):
            yield name.decode(errors="replace"), module


def _only(message: bytes, wanted: int) -> bytes:
    """The bytes of a field; none where the field is missing."""
    for number, value in fields(message):
        if number == wanted and isinstance(value, bytes):
            return value
    return b""


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield number and content of each field of a message, in order.

    Raises:
        TPUValidationError: The bytes are cut short or no message.
    """
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == _VARINT:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        if kind == _LENGTH:
            length, at = _varint(message, at)
        elif kind in (_FIXED64, _FIXED32):
            length = 8 if kind == _FIXED64 else 4
        else:
            raise _damaged(f"a field of unknown kind {kind} at byte {at}")
        if at + length > len(message):
            raise _damaged(f"a field of {length} bytes with {len(message) - at} left")
        yield key >> 3, message[at : at + length]
        at += length


def packed_numbers(content: bytes) -> list[int]:
    """Numbers that were written one after another without keys."""
    numbers: list[int] = []
    at = 0
    while at < len(content):
        value, at = _varint(content, at)
        numbers.append(value)
    return numbers


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for place in range(_LONGEST_VARINT):
        if at >= len(message):
            raise _damaged("a number that is cut short")
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            return value, at
    raise _damaged(f"a number that does not end before byte {at}")


def _damaged(seen: str) -> TPUValidationError:
    return TPUValidationError(f"it is cut short or damaged: it holds {seen}.")

"""The programs inside an xplane file: what `jax.profiler.ProfileData` leaves out of it.

An xplane file is a protocol buffer (tsl/profiler/protobuf/xplane.proto). Planes, lines and events
are read by jax's own `ProfileData`. The programs that ran lie in the metadata of a plane that has
no events, which that class does not show; XProf shows them and is an optional dependency. Reading
the wire format finds them on every machine with jax.
"""

from collections.abc import Iterator

from ...errors import TPUValidationError
from ...runtime.protobuf_wire import iter_fields, iter_packed

METADATA_PLANE = b"/host:metadata"
# Field numbers, which a published protocol buffer never changes.
PLANES = 1  # of XSpace
PLANE_NAME, EVENT_METADATA = 2, 4  # of XPlane
VALUE = 2  # of an entry of a map
NAME, STATS = 2, 5  # of XEventMetadata
BYTES = 6  # of XStat
HLO_MODULE = 1  # of HloProto


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
    try:
        yield from iter_fields(message)
    except ValueError as error:
        raise _damaged(error) from None


def packed_numbers(content: bytes) -> list[int]:
    """Numbers that were written one after another without keys.

    Raises:
        TPUValidationError: The last one is cut short.
    """
    try:
        return list(iter_packed(content))
    except ValueError as error:
        raise _damaged(error) from None


def _damaged(error: ValueError) -> TPUValidationError:
    return TPUValidationError(f"it is cut short or damaged: {error}.")

"""Perfetto's own format: TrackEvent packets, which keep nanoseconds and need no viewer's guess.

Field numbers are those of perfetto/protos/perfetto/trace (trace_packet, track_descriptor,
track_event, debug_annotation, counter_descriptor), which are never renumbered.
"""

from collections.abc import Iterator

from ....compiler.timeline import Span
from .trace import MEMORY_COUNTER, Trace, arguments_of
from .wire import block, number, real, text

PACKET = 1  # of Trace
TIMESTAMP, SEQUENCE, EVENT, FLAGS, DESCRIPTOR = 8, 10, 11, 13, 60  # of TracePacket
UUID, NAME, PROCESS, PARENT, COUNTER, ORDERING, RANK = 1, 2, 3, 5, 8, 11, 12  # of TrackDescriptor
PID, PROCESS_NAME = 1, 6  # of ProcessDescriptor
UNIT, UNIT_BYTES = 3, 3  # of CounterDescriptor
ANNOTATION, TYPE, TRACK, CATEGORY, EVENT_NAME, VALUE = 4, 9, 11, 22, 23, 30  # of TrackEvent
KEY, INTEGER, DOUBLE, STRING = 10, 4, 5, 6  # of DebugAnnotation
BEGIN, END, COUNT = 1, 2, 4  # TrackEvent.Type
EXPLICIT = 3  # ChildTracksOrdering
STATE_CLEARED = 1  # SequenceFlags
_ROOT = 1
_SEQUENCE_ID = 1


def track_event_bytes(trace: Trace) -> bytes:
    """The trace as a `.pftrace` file."""
    return b"".join(block(PACKET, packet) for packet in _packets(trace))


def _packets(trace: Trace) -> Iterator[bytes]:
    """The tracks, then all that happens on them in order of time."""
    process = number(PID, 1) + text(PROCESS_NAME, trace.name)
    root = number(UUID, _ROOT) + block(PROCESS, process) + number(ORDERING, EXPLICIT)
    yield _packet(block(DESCRIPTOR, root), flags=STATE_CLEARED)
    events: list[tuple[int, bytes]] = []
    for uuid, lane in enumerate(trace.lanes, start=_ROOT + 1):
        yield _packet(block(DESCRIPTOR, _track(uuid, lane.title)))
        events += _slices(uuid, lane.spans)
    if trace.memory:
        uuid = _ROOT + 1 + len(trace.lanes)
        counter = block(COUNTER, number(UNIT, UNIT_BYTES))
        yield _packet(block(DESCRIPTOR, _track(uuid, MEMORY_COUNTER) + counter))
        about = number(TYPE, COUNT) + number(TRACK, uuid)
        events += [(moment, about + number(VALUE, amount)) for moment, amount in trace.memory]
    # Stable: what a track says of one moment stays in the order it was said.
    for moment, event in sorted(events, key=lambda one: one[0]):
        yield _packet(block(EVENT, event), moment=moment)


def _track(uuid: int, title: str) -> bytes:
    return number(UUID, uuid) + number(PARENT, _ROOT) + text(NAME, title) + number(RANK, uuid)


def _slices(uuid: int, spans: tuple[tuple[int, int, Span], ...]) -> Iterator[tuple[int, bytes]]:
    """Begins and ends in order of time: a begin opens inside what is open, an end closes it."""
    still_open: list[int] = []
    finish = number(TYPE, END) + number(TRACK, uuid)
    for start, end, span in spans:
        while still_open and still_open[-1] <= start:
            yield still_open.pop(), finish
        yield start, _begin(uuid, span)
        still_open.append(end)
    while still_open:
        yield still_open.pop(), finish


def _begin(uuid: int, span: Span) -> bytes:
    event = number(TYPE, BEGIN) + number(TRACK, uuid)
    event += text(CATEGORY, span.cause) + text(EVENT_NAME, span.name)
    for key, value in arguments_of(span).items():
        event += block(ANNOTATION, text(KEY, key) + _annotated(value))
    return event


def _annotated(value: str | float) -> bytes:
    if isinstance(value, str):
        return text(STRING, value)
    return number(INTEGER, value) if isinstance(value, int) else real(DOUBLE, value)


def _packet(content: bytes, *, moment: int | None = None, flags: int = 0) -> bytes:
    packet = number(SEQUENCE, _SEQUENCE_ID) + content
    if moment is not None:
        packet = number(TIMESTAMP, moment) + packet
    return packet + (number(FLAGS, flags) if flags else b"")

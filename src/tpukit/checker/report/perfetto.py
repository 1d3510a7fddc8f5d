"""Write steps as traces for https://ui.perfetto.dev, as JSON or as TrackEvent packets.

Each step is one process: a predicted one and, if there is one, a measured one with the same rows.

chrome://tracing reads the JSON too. TrackEvent packets are Perfetto's own format, which keeps
nanoseconds. Their field numbers are those of perfetto/protos/perfetto/trace (trace_packet,
track_descriptor, track_event, debug_annotation, counter_descriptor), which are never renumbered.
The wire format takes thirty lines; the perfetto package would pin a protobuf version that conflicts
with those of libtpu and TensorFlow.
"""

import gzip
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...compiler.timeline import TrackSpan
from ...errors import TPUValidationError, did_you_mean
from ...runtime.files import write_output
from .lanes import Lane, find_loops, later_turns, split_into_lanes

ENDINGS = (".json", ".json.gz", ".pftrace", ".pftrace.gz")
MEMORY_COUNTER = "live HBM"
ORIGIN = "model"
_VARINT, _FIXED64, _LENGTH = 0, 1, 2  # kinds of field on the wire
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
_SEQUENCE_ID = 1


def write_perfetto(
    spans: Sequence[TrackSpan],
    path: Path,
    *,
    memory: Sequence[Sequence[float]] | None = None,
    name: str = "predicted step, one device",
) -> Path:
    """Write a trace: JSON for `.json`, Perfetto's own format for `.pftrace`, compressed with `.gz`.

    Rows are the core, HBM copies, ICI, DCN and the host link. A loop's body is shown in its first
    iteration. Each slice has FLOPs, bytes, op name, cause and number of runs.

    Args:
        spans: Spans of a `StepPrediction`, or of a report that was read back.
        path: The file to write.
        memory: (seconds, bytes) of live HBM for a counter, as in a report's `live_memory`.
        name: Name of the process.

    Raises:
        TPUValidationError: The path has another ending, or there are no spans.
    """
    ending_of(path)  # before the timeline: a wrong name is the first thing to fix
    if not spans:
        raise TPUValidationError(
            "there is no timeline to write: the check stopped at the verdict on memory; "
            "run it without --memory-only, on something that fits."
        )
    return write_traces([Trace.of(spans, name=name, memory=memory or ())], path)


def write_traces(traces: Sequence["Trace"], path: Path) -> Path:
    """Write steps into one file, each as its own process.

    Raises:
        TPUValidationError: The path has none of the `ENDINGS`.
    """
    ending = ending_of(path)
    if ending.startswith(".json"):
        content = json.dumps(chrome_events(*traces), separators=(",", ":")).encode()
    else:
        content = track_event_bytes(*traces)
    # A fixed time stamp makes the file reproducible.
    write_output(path, gzip.compress(content, mtime=0) if ending.endswith(".gz") else content)
    return path


def ending_of(path: Path) -> str:
    """Return the ending of a trace's file name, one of `ENDINGS`."""
    ending = next((known for known in ENDINGS[::-1] if path.name.endswith(known)), None)
    if ending is None:
        raise TPUValidationError(
            f"{path.name} is no name for a trace; end it with {', '.join(ENDINGS)}."
            + did_you_mean("".join(path.suffixes[-2:]), ENDINGS)
        )
    return ending


@dataclass(frozen=True)
class Trace:
    """One device's step.

    Attributes:
        name: Name of the device.
        lanes: Rows of slices, in reading order.
        memory: (nanoseconds, bytes) of live HBM, sorted by time.
        origin: Origin of its times: "model" or "measured".
    """

    name: str
    lanes: tuple[Lane, ...]
    memory: tuple[tuple[int, int], ...]
    origin: str = ORIGIN

    @classmethod
    def of(
        cls,
        spans: Sequence[TrackSpan],
        *,
        name: str,
        memory: Sequence[Sequence[float]] = (),
        origin: str = ORIGIN,
    ) -> "Trace":
        """Arrange a step in rows; the later iterations of a loop become one slice."""
        whole = [*spans, *later_turns(find_loops(spans))]
        points = sorted((round(seconds * 1e9), round(amount)) for seconds, amount in memory)
        # Of several values at one moment only the highest matters.
        highest: dict[int, int] = {}
        for moment, amount in points:
            highest[moment] = max(amount, highest.get(moment, 0))
        return cls(name, tuple(split_into_lanes(whole)), tuple(highest.items()), origin)


def arguments_of(span: TrackSpan, origin: str = ORIGIN) -> dict[str, str | int | float]:
    """Return the arguments that a viewer shows for a slice."""
    return {
        "cause": span.cause,
        "op_name": span.op_name,
        "flops": span.flops,
        "bytes": span.bytes,
        "times": span.times,
        "origin": origin,
    }


def varint(value: int) -> bytes:
    """Encode an integer as a varint; a negative one as 64 bits."""
    value &= 2**64 - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def number(field: int, value: int) -> bytes:
    """Encode an integer or enumeration field."""
    return varint(field << 3 | _VARINT) + varint(value)


def real(field: int, value: float) -> bytes:
    """Encode a double field."""
    return varint(field << 3 | _FIXED64) + struct.pack("<d", value)


def block(field: int, value: bytes) -> bytes:
    """Encode a field that contains a message or bytes."""
    return varint(field << 3 | _LENGTH) + varint(len(value)) + value


def text(field: int, value: str) -> bytes:
    """Encode a string field; invalid Unicode becomes a replacement character."""
    return block(field, value.encode("utf-8", errors="replace"))


def track_event_bytes(*traces: Trace) -> bytes:
    """Return the traces as a `.pftrace` file."""
    return b"".join(block(PACKET, packet) for packet in _packets(traces))


def _packets(traces: Sequence[Trace]) -> Iterator[bytes]:
    """Yield the track descriptors, then all events in order of time."""
    events: list[tuple[int, bytes]] = []
    uuid = 0
    for pid, trace in enumerate(traces, start=1):
        root = uuid = uuid + 1
        process = number(PID, pid) + text(PROCESS_NAME, trace.name)
        about = number(UUID, root) + block(PROCESS, process) + number(ORDERING, EXPLICIT)
        yield _packet(block(DESCRIPTOR, about), flags=STATE_CLEARED if pid == 1 else 0)
        for lane in trace.lanes:
            uuid += 1
            yield _packet(block(DESCRIPTOR, _track(uuid, lane.title, root)))
            events += _slices(uuid, lane.spans, trace.origin)
        if trace.memory:
            uuid += 1
            counter = block(COUNTER, number(UNIT, UNIT_BYTES))
            yield _packet(block(DESCRIPTOR, _track(uuid, MEMORY_COUNTER, root) + counter))
            about = number(TYPE, COUNT) + number(TRACK, uuid)
            events += [(moment, about + number(VALUE, amount)) for moment, amount in trace.memory]
    # The sort is stable, so events of one track at one moment keep their order.
    for moment, event in sorted(events, key=lambda one: one[0]):
        yield _packet(block(EVENT, event), moment=moment)


def _track(uuid: int, title: str, parent: int) -> bytes:
    return number(UUID, uuid) + number(PARENT, parent) + text(NAME, title) + number(RANK, uuid)


def _slices(
    uuid: int, spans: tuple[tuple[int, int, TrackSpan], ...], origin: str
) -> Iterator[tuple[int, bytes]]:
    """Yield begin and end events in order of time; a slice may nest inside an open one."""
    still_open: list[int] = []
    finish = number(TYPE, END) + number(TRACK, uuid)
    for start, end, span in spans:
        while still_open and still_open[-1] <= start:
            yield still_open.pop(), finish
        yield start, _begin(uuid, span, origin)
        still_open.append(end)
    while still_open:
        yield still_open.pop(), finish


def _begin(uuid: int, span: TrackSpan, origin: str) -> bytes:
    event = number(TYPE, BEGIN) + number(TRACK, uuid)
    event += text(CATEGORY, span.cause) + text(EVENT_NAME, span.name)
    for key, value in arguments_of(span, origin).items():
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


def chrome_events(*traces: Trace) -> dict[str, Any]:
    """Return the traces as JSON data: complete slices by row, with times in microseconds."""
    events: list[dict[str, Any]] = []
    for process, trace in enumerate(traces, start=1):
        events.append(_about("process_name", process, 0, name=trace.name))
        for thread, lane in enumerate(trace.lanes, start=1):
            events.append(_about("thread_name", process, thread, name=lane.title))
            events.append(_about("thread_sort_index", process, thread, sort_index=thread))
            events += [
                {
                    "ph": "X",
                    "pid": process,
                    "tid": thread,
                    "name": span.name,
                    "cat": span.cause,
                    "ts": start / 1000,
                    "dur": (end - start) / 1000,
                    "args": arguments_of(span, trace.origin),
                }
                for start, end, span in lane.spans
            ]
        events += [
            {
                "ph": "C",
                "pid": process,
                "name": MEMORY_COUNTER,
                "ts": moment / 1000,
                "args": {"bytes": amount},
            }
            for moment, amount in trace.memory
        ]
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def _about(what: str, process: int, thread: int, **values: str | int) -> dict[str, Any]:
    return {"ph": "M", "pid": process, "tid": thread, "name": what, "args": values}

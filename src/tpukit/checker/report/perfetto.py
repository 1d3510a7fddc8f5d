"""Steps as a trace for https://ui.perfetto.dev, in either format that it reads.

One process a step: a predicted one, and a measured one beside it under the same names of rows.

JSON is what chrome://tracing reads too. TrackEvent packets are Perfetto's own format: they keep
nanoseconds and need no viewer's guess. Their field numbers are those of
perfetto/protos/perfetto/trace (trace_packet, track_descriptor, track_event, debug_annotation,
counter_descriptor), which are never renumbered. Thirty lines of a wire format frozen since 2008
cost less than a dependency on a package whose versions libtpu, TensorFlow and cloud clients already
fight over.
"""

import gzip
import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

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


class Predicted(Protocol):
    """Whatever has spans: a `StepPrediction`, or a report read back."""

    @property
    def spans(self) -> Sequence[TrackSpan]:
        """What runs when."""
        ...


def write_perfetto(
    prediction: Predicted,
    path: Path,
    *,
    memory: Sequence[Sequence[float]] | None = None,
    name: str = "predicted step, one device",
) -> Path:
    """Write a step's trace: JSON for `.json`, Perfetto's own format for `.pftrace`, `.gz` packed.

    Rows are the core, HBM copies, ICI, DCN and the host link; a loop's body is shown in its
    first iteration, and each slice carries FLOPs, bytes, op name, cause and how often it runs.

    Args:
        prediction: What has spans.
        path: Where to write.
        memory: (seconds, bytes) of live HBM, as a report's `live_memory`, for a counter.
        name: What the process is called.

    Raises:
        TPUValidationError: The path ends otherwise, or there are no spans.
    """
    ending_of(path)  # before the timeline: a wrong name is the first thing to mend
    if not prediction.spans:
        raise TPUValidationError(
            "there is no timeline to write: the check stopped at the verdict on memory; "
            "run it without --memory-only, on something that fits."
        )
    return write_traces([Trace.of(prediction.spans, name=name, memory=memory or ())], path)


def write_traces(traces: Sequence["Trace"], path: Path) -> Path:
    """Write steps into one file, each as a process of its own.

    Raises:
        TPUValidationError: The path ends otherwise than `ENDINGS`.
    """
    ending = ending_of(path)
    if ending.startswith(".json"):
        content = json.dumps(chrome_events(*traces), separators=(",", ":")).encode()
    else:
        content = track_event_bytes(*traces)
    # A fixed time stamp, so that the same step gives the same file.
    write_output(path, gzip.compress(content, mtime=0) if ending.endswith(".gz") else content)
    return path


def ending_of(path: Path) -> str:
    """The ending of a trace's name, one of `ENDINGS`."""
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
        name: Of the device, as a person reads it.
        lanes: Rows of slices, in reading order.
        memory: (nanoseconds, bytes) of live HBM, in order of time.
        origin: Where its times come from: "model" or "measured".
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
        """Lay a step out; what of a loop is not shown becomes one slice that says so."""
        whole = [*spans, *later_turns(find_loops(spans))]
        points = sorted((round(seconds * 1e9), round(amount)) for seconds, amount in memory)
        # Of several values at one moment the highest is the one that must fit.
        highest: dict[int, int] = {}
        for moment, amount in points:
            highest[moment] = max(amount, highest.get(moment, 0))
        return cls(name, tuple(split_into_lanes(whole)), tuple(highest.items()), origin)


def arguments_of(span: TrackSpan, origin: str = ORIGIN) -> dict[str, str | int | float]:
    """What a slice says of itself when it is clicked."""
    return {
        "cause": span.cause,
        "op_name": span.op_name,
        "flops": span.flops,
        "bytes": span.bytes,
        "times": span.times,
        "origin": origin,
    }


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


def track_event_bytes(*traces: Trace) -> bytes:
    """The traces as a `.pftrace` file."""
    return b"".join(block(PACKET, packet) for packet in _packets(traces))


def _packets(traces: Sequence[Trace]) -> Iterator[bytes]:
    """The tracks, then all that happens on them in order of time."""
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
    # Stable: what a track says of one moment stays in the order it was said.
    for moment, event in sorted(events, key=lambda one: one[0]):
        yield _packet(block(EVENT, event), moment=moment)


def _track(uuid: int, title: str, parent: int) -> bytes:
    return number(UUID, uuid) + number(PARENT, parent) + text(NAME, title) + number(RANK, uuid)


def _slices(
    uuid: int, spans: tuple[tuple[int, int, TrackSpan], ...], origin: str
) -> Iterator[tuple[int, bytes]]:
    """Begins and ends in order of time: a begin opens inside what is open, an end closes it."""
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
    """The traces as JSON data: complete slices by row, times in microseconds."""
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

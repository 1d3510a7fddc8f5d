"""Write steps as traces for https://ui.perfetto.dev, as JSON or as TrackEvent packets.

Each step is one process: a predicted one and, if there is one, a measured one with the same rows.

chrome://tracing reads the JSON too. TrackEvent packets are Perfetto's own format, which keeps
nanoseconds. Their fields are those of perfetto/protos/perfetto/trace, which are never renumbered;
the perfetto package would pin a protobuf version that conflicts with those of libtpu and
TensorFlow.
"""

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...compiler.timeline import TrackSpan
from ...errors import TPUValidationError, did_you_mean
from ...plain_data import JsonObject
from ...runtime.files import write_output
from ...runtime.protobuf_messages import message_classes
from .lanes import Lane, find_loops, later_turns, split_into_lanes

ENDINGS = (".json", ".json.gz", ".pftrace", ".pftrace.gz")
MEMORY_COUNTER = "live HBM"
ORIGIN = "model"
BEGIN, END, COUNT = 1, 2, 4  # TrackEvent.Type
EXPLICIT = 3  # ChildTracksOrdering
STATE_CLEARED = 1  # SequenceFlags
UNIT_BYTES = 3  # CounterDescriptor.Unit
_SEQUENCE_ID = 1
_MESSAGES = message_classes(
    "perfetto.protos",
    """
    message Trace { repeated TracePacket packet = 1; }
    message TracePacket {
      uint64 timestamp = 8; uint32 trusted_packet_sequence_id = 10; TrackEvent track_event = 11;
      uint32 sequence_flags = 13; TrackDescriptor track_descriptor = 60;
    }
    message TrackDescriptor {
      uint64 uuid = 1; string name = 2; ProcessDescriptor process = 3; uint64 parent_uuid = 5;
      CounterDescriptor counter = 8; int32 child_ordering = 11; int32 sibling_order_rank = 12;
    }
    message ProcessDescriptor { int32 pid = 1; string process_name = 6; }
    message CounterDescriptor { int32 unit = 3; }
    message TrackEvent {
      repeated DebugAnnotation debug_annotations = 4; int32 type = 9; uint64 track_uuid = 11;
      repeated string categories = 22; string name = 23; int64 counter_value = 30;
    }
    message DebugAnnotation {
      int64 int_value = 4; double double_value = 5; string string_value = 6; string name = 10;
    }
    """,
    syntax="proto2",
)


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


def track_event_bytes(*traces: Trace) -> bytes:
    """Return the traces as a `.pftrace` file: track descriptors, then all events in time order."""
    file = _MESSAGES["Trace"]()
    events: list[tuple[int, JsonObject]] = []
    uuid = 0

    def describe(**fields: Any) -> None:
        file.packet.add(trusted_packet_sequence_id=_SEQUENCE_ID, track_descriptor=fields)

    for pid, trace in enumerate(traces, start=1):
        root = uuid = uuid + 1
        process = {"pid": pid, "process_name": trace.name}
        describe(uuid=root, process=process, child_ordering=EXPLICIT)
        for lane in trace.lanes:
            uuid += 1
            describe(uuid=uuid, parent_uuid=root, name=lane.title, sibling_order_rank=uuid)
            events += _slices(uuid, lane.spans, trace.origin)
        if trace.memory:
            uuid += 1
            describe(
                uuid=uuid,
                parent_uuid=root,
                name=MEMORY_COUNTER,
                sibling_order_rank=uuid,
                counter={"unit": UNIT_BYTES},
            )
            events += [
                (moment, {"type": COUNT, "track_uuid": uuid, "counter_value": amount})
                for moment, amount in trace.memory
            ]
    if file.packet:
        file.packet[0].sequence_flags = STATE_CLEARED
    # The sort is stable, so events of one track at one moment keep their order.
    for moment, event in sorted(events, key=lambda one: one[0]):
        file.packet.add(
            timestamp=moment, trusted_packet_sequence_id=_SEQUENCE_ID, track_event=event
        )
    return file.SerializeToString()


def _slices(
    uuid: int, spans: tuple[tuple[int, int, TrackSpan], ...], origin: str
) -> Iterator[tuple[int, JsonObject]]:
    """Yield begin and end events in order of time; a slice may nest inside an open one."""
    still_open: list[int] = []
    finish = {"type": END, "track_uuid": uuid}
    for start, end, span in spans:
        while still_open and still_open[-1] <= start:
            yield still_open.pop(), finish
        notes = [_annotation(key, value) for key, value in arguments_of(span, origin).items()]
        yield (
            start,
            {
                "type": BEGIN,
                "track_uuid": uuid,
                "categories": [span.cause],
                "name": span.name,
                "debug_annotations": notes,
            },
        )
        still_open.append(end)
    while still_open:
        yield still_open.pop(), finish


def _annotation(name: str, value: str | float) -> dict[str, str | float]:
    kind = {str: "string_value", int: "int_value", float: "double_value"}[type(value)]
    return {"name": name, kind: value}


def chrome_events(*traces: Trace) -> JsonObject:
    """Return the traces as JSON data: complete slices by row, with times in microseconds."""
    events: list[JsonObject] = []
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


def _about(what: str, process: int, thread: int, **values: str | int) -> JsonObject:
    return {"ph": "M", "pid": process, "tid": thread, "name": what, "args": values}

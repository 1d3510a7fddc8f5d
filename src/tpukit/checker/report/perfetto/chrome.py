"""The JSON trace format that Perfetto and chrome://tracing read."""

from typing import Any

from .trace import MEMORY_COUNTER, Trace, arguments_of

_PROCESS = 1


def chrome_events(trace: Trace) -> dict[str, Any]:
    """The trace as JSON data: complete slices by row, times in microseconds."""
    events: list[dict[str, Any]] = [_about("process_name", 0, name=trace.name)]
    for thread, lane in enumerate(trace.lanes, start=1):
        events.append(_about("thread_name", thread, name=lane.title))
        events.append(_about("thread_sort_index", thread, sort_index=thread))
        events += [
            {
                "ph": "X",
                "pid": _PROCESS,
                "tid": thread,
                "name": span.name,
                "cat": span.cause,
                "ts": start / 1000,
                "dur": (end - start) / 1000,
                "args": arguments_of(span),
            }
            for start, end, span in lane.spans
        ]
    events += [
        {
            "ph": "C",
            "pid": _PROCESS,
            "name": MEMORY_COUNTER,
            "ts": moment / 1000,
            "args": {"bytes": amount},
        }
        for moment, amount in trace.memory
    ]
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def _about(what: str, thread: int, **values: str | int) -> dict[str, Any]:
    return {"ph": "M", "pid": _PROCESS, "tid": thread, "name": what, "args": values}

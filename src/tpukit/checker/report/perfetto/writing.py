"""Write a predicted step for https://ui.perfetto.dev, which reads the file in the browser."""

import gzip
import json
from collections.abc import Sequence
from pathlib import Path

from ....errors import TPUValidationError, did_you_mean
from ....runtime.files import write_output
from .chrome import chrome_events
from .trace import Predicted, Trace
from .track_event import track_event_bytes

ENDINGS = (".json", ".json.gz", ".pftrace", ".pftrace.gz")


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
    ending = next((known for known in ENDINGS[::-1] if path.name.endswith(known)), None)
    if ending is None:
        raise TPUValidationError(
            f"{path.name} is no name for a trace; end it with {', '.join(ENDINGS)}."
            + did_you_mean("".join(path.suffixes[-2:]), ENDINGS)
        )
    if not prediction.spans:
        raise TPUValidationError(
            "there is no timeline to write: the check stopped at the verdict on memory; "
            "run it without --memory-only, on something that fits."
        )
    trace = Trace.of(prediction.spans, name=name, memory=memory or ())
    if ending.startswith(".json"):
        content = json.dumps(chrome_events(trace), separators=(",", ":")).encode()
    else:
        content = track_event_bytes(trace)
    # A fixed time stamp, so that the same step gives the same file.
    write_output(path, gzip.compress(content, mtime=0) if ending.endswith(".gz") else content)
    return path

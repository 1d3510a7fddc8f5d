"""XProf's own figures of a recording, where XProf is installed and supports the device.

Its converters are native code that logs much and keeps caches beside its input, so they run in a
child process, on copies: `python -m tpukit.observe.profiling.xprof`.
"""

import json
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec

from ...errors import MissingExtraError
from ...plain_data import JsonMapping, JsonObject
from ...runtime.child import ChildError, run_child, serve_request
from ...runtime.files import temporary_folder
from ...shown import Facts
from .recording import Recording

TIMEOUT_S = 120


@dataclass(frozen=True)
class XprofFigures(Facts):
    """Figures by name, or the reason why there are none."""

    figures: Mapping[str, str] = field(default_factory=dict[str, str])
    reason: str = ""


def xprof_figures(recording: Recording | None, *, timeout_s: float = TIMEOUT_S) -> XprofFigures:
    """Return XProf's overview of a recording."""
    if recording is None:
        return XprofFigures(reason="nothing was recorded")
    tracks = [track for host in recording.hosts for track in host.devices]
    if all(track.platform == "CPU" for track in tracks):
        return XprofFigures(reason="XProf supports TPUs and GPUs, and this ran on a CPU")
    if find_spec("xprof") is None:
        missing = MissingExtraError("profile", needed_for="XProf's overview", module="xprof")
        return XprofFigures(reason=str(missing).rstrip("."))
    with temporary_folder("tpukit-xprof-") as folder:
        copies = [shutil.copy(host.path, folder / host.path.name) for host in recording.hosts]
        request = {"files": [str(copy) for copy in copies]}
        try:
            reply = run_child(f"{__package__}.xprof", request, timeout_s=timeout_s)
        except ChildError as error:
            return XprofFigures(reason=f"XProf failed ({error})")
    if not reply["figures"]:
        return XprofFigures(reason="its overview of this file is empty")
    return XprofFigures(reply["figures"])


# Properties of XProf's overview page, and their names here.
OVERVIEW = {
    "device_duty_cycle_percent": "device duty cycle",
    "device_idle_time_percent": "device idle",
    "mxu_utilization_percent": "MXU utilization",
    "flop_rate_utilization_relative_to_roofline": "FLOP rate of the roofline",
    "memory_bw_utilization_relative_to_hw_limit": "memory bandwidth of its limit",
    "hbm_utilization_percent": "HBM bandwidth",
    "steptime_ms_average": "step in ms, average",
    "input_conclusion": "input",
}


def figures(request: JsonMapping) -> JsonObject:
    """Return XProf's overview, and the time of ops by XProf's bound."""
    from xprof.convert import raw_to_tool_data as converter

    files: Sequence[str] = request["files"]
    overview: dict[str, str] = {}
    for table in _tables(converter.xspace_to_tool_data(files, "overview_page", {})[0]):
        about: JsonMapping = table.get("p") or {}
        for key, name in OVERVIEW.items():
            value = str(about.get(key, ""))
            if value and value not in ("0.0%", "0.0", "0.00"):
                overview.setdefault(name, value)
    bounds: defaultdict[str, float] = defaultdict(float)
    for table in _tables(converter.xspace_to_tool_data(files, "hlo_stats", {})[0]):
        columns = [column["id"] for column in table.get("cols", ())]
        if not {"bound_by", "total_self_time_percent"} <= set(columns):
            continue
        at, share = columns.index("bound_by"), columns.index("total_self_time_percent")
        for row in table.get("rows", ()):
            cells = [cell.get("v") if cell else None for cell in row["c"]]
            bounds[str(cells[at])] += float(cells[share] or 0.0)
    overview.update({f"ops bound by {name}": f"{share:.1f}%" for name, share in bounds.items()})
    return {"figures": overview}


def _tables(content: bytes | str | None) -> Iterator[JsonMapping]:
    """Yield the tables of a response: one, or a list of them."""
    data = json.loads(content) if content else []
    yield from data if isinstance(data, list) else [data]


if __name__ == "__main__":
    serve_request(figures)

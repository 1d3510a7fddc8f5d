"""The child that runs XProf's converters: `python -m tpukit.observe.profiling.xprof_child`."""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ...runtime.child import serve_request

# Properties of XProf's overview page, by what they are called here.
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


def figures(request: Mapping[str, Any]) -> dict[str, Any]:
    """XProf's overview, and the time of ops by what it says bounds them."""
    from xprof.convert import raw_to_tool_data as converter

    files: Sequence[str] = request["files"]
    found: dict[str, str] = {}
    for table in _tables(converter.xspace_to_tool_data(files, "overview_page", {})[0]):
        about: Mapping[str, Any] = table.get("p") or {}
        for key, name in OVERVIEW.items():
            value = str(about.get(key, ""))
            if value and value not in ("0.0%", "0.0", "0.00"):
                found.setdefault(name, value)
    bounds: defaultdict[str, float] = defaultdict(float)
    for table in _tables(converter.xspace_to_tool_data(files, "hlo_stats", {})[0]):
        columns = [column["id"] for column in table.get("cols", ())]
        if not {"bound_by", "total_self_time_percent"} <= set(columns):
            continue
        at, share = columns.index("bound_by"), columns.index("total_self_time_percent")
        for row in table.get("rows", ()):
            cells = [cell.get("v") if cell else None for cell in row["c"]]
            bounds[str(cells[at])] += float(cells[share] or 0.0)
    found.update({f"ops bound by {name}": f"{share:.1f}%" for name, share in bounds.items()})
    return {"figures": found}


def _tables(content: bytes | str | None) -> Iterator[Mapping[str, Any]]:
    """The tables of an answer: one, or a list of them."""
    data = json.loads(content) if content else []
    yield from data if isinstance(data, list) else [data]


if __name__ == "__main__":
    serve_request(figures)

"""The chips of a run with their place in the torus and newest value of a metric."""

from collections import defaultdict
from collections.abc import Mapping

from ...errors import SliceError
from ...hardware import Slice
from ...hardware.figure import count_text
from ...hardware.slice import chip_positions
from ...hardware.topology import format_shape
from ...plain_data import JsonMapping, JsonObject
from ..readings import METRICS, Reading
from ..runs import Run

PREFERRED = ("duty_cycle", "tensorcore_utilization", "memory_used")
NO_READING = "no monitor wrote readings of this host"


def chips_view(run: Run, metric: str | None) -> JsonObject:
    """Return every chip with its place, its host and its value.

    Args:
        run: The run.
        metric: A chip metric of `METRICS`; by default the first one with readings.
    """
    readings = run.readings()
    offered = _metrics(readings)
    chosen = metric or next(
        (name for name in (*PREFERRED, *offered) if name in offered), PREFERRED[0]
    )
    values, missing = _values(readings, chosen)
    hosts = {process: reading.host for (process, _), reading in readings.items()}
    places, layout = _places(run, values)
    about = METRICS.get(chosen)
    return {
        "metric": chosen,
        "unit": about.unit if about else "",
        "meaning": about.meaning if about else "",
        "origin": "measured",
        "metrics": offered,
        "layout": layout,
        "newest": max((reading.time for reading in readings.values()), default=None),
        "chips": [
            {
                **place,
                "host": hosts.get(place["process"], ""),
                **_value(place, values, missing, hosts),
            }
            for place in places
        ],
    }


def _value(
    place: JsonMapping,
    values: Mapping[tuple[int, int], float],
    missing: Mapping[int, str],
    hosts: Mapping[int, str],
) -> JsonObject:
    value = values.get((place["process"], place["chip"]))
    if value is not None:
        return {"value": value}
    process = place["process"]
    unsaid = "its monitor has no value" if process in hosts else NO_READING
    return {"value": None, "reason": missing.get(process, unsaid)}


def _metrics(readings: Mapping[tuple[int, str], Reading]) -> list[str]:
    """Return the chip metrics in the readings, in the order of `METRICS`."""
    given = {
        sample.metric
        for reading in readings.values()
        for sample in reading.samples
        if sample.chip is not None
    }
    return [name for name in METRICS if name in given]


def _values(
    readings: Mapping[tuple[int, str], Reading], metric: str
) -> tuple[dict[tuple[int, int], float], dict[int, str]]:
    """Return the newest value by process and chip, and reasons by process."""
    values: dict[tuple[int, int], float] = {}
    missing: dict[int, str] = {}
    for (process, _), reading in sorted(readings.items(), key=lambda entry: entry[1].time):
        if metric in reading.missing:
            missing[process] = reading.missing[metric]
        for sample in reading.samples:
            if sample.metric == metric and sample.chip is not None:
                values[process, sample.chip] = sample.value
    return values, missing


def _places(
    run: Run, values: Mapping[tuple[int, int], float]
) -> tuple[list[JsonObject], JsonObject]:
    """Return where each chip is drawn: in its torus, or in a row per host without a slice."""
    summary = run.summary()
    try:
        target = Slice.parse(summary.slice) if summary.slice else None
    except SliceError:
        target = None
    if target is not None:
        places = [position.to_dict() for position in chip_positions(target)]
        return places, {
            "kind": "torus" if any(target.wraps) else "mesh",
            "slice": str(target),
            "shape": list(target.topology),
            "wraps": list(target.wraps),
            "slices": target.num_slices,
            "chips_per_host": target.chips_per_host,
            "words": f"{target}: {format_shape(target.topology)}, "
            + count_text(target.hosts, "host"),
        }
    hosts: defaultdict[int, set[int]] = defaultdict(set)
    for process, chip in values:
        hosts[process].add(chip)
    for process in run.processes():
        hosts[process] |= set(range(len(hosts[process]) or 1))
    width = max((len(chips) for chips in hosts.values()), default=0)
    places = [
        {"process": process, "chip": chip, "slice_index": 0, "coordinates": [chip, row]}
        for row, (process, chips) in enumerate(sorted(hosts.items()))
        for chip in sorted(chips)
    ]
    kind = summary.device_kind or "devices"
    return places, {
        "kind": "rows",
        "slice": None,
        "shape": [width, len(hosts)],
        "wraps": [False, False],
        "slices": 1,
        "chips_per_host": width,
        "words": f"{kind}: no TPU slice, so each row is a host, and links are unknown",
    }

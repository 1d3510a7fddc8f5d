"""Readings in Prometheus's text format, under the names and labels that GKE's exporter uses.

GKE's own metrics keep its names, units (percent) and labels, so that boards made for it work. What
GKE has no name for is called `tpukit_…` in base units; what Orbax and Grain named keeps its name.
prometheus_client could write this too, at eight times the cost with the series of 512 chips.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..readings import METRICS, Reading

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SUFFIXES = {"B": "_bytes", "B/s": "_bytes_per_second", "share": "_ratio"}
UP = "tpukit_source_up"
PREFIX = "tpukit_"


@dataclass(frozen=True)
class Labels:
    """What GKE's exporter says of every chip, and the environment of a pod tells.

    Attributes:
        model: Kind of chip: "tpu-v6e-slice" for TPUs, as in GKE's node label.
        tpu_topology: Such as "2x2".
        make: "cloud-tpu", or "nvidia".
        others: `namespace`, `pod`, `container` … where they are known.
    """

    model: str = ""
    tpu_topology: str = ""
    make: str = "cloud-tpu"
    others: Mapping[str, str] = field(default_factory=dict[str, str])


def prometheus_name(metric: str) -> str:
    """Return what a metric is called in the text."""
    known = METRICS.get(metric)
    if known is None:
        return metric
    suffix = SUFFIXES.get(known.unit, "")
    return known.gke_name or f"{PREFIX}{metric}{'' if metric.endswith(suffix) else suffix}"


def write_text(readings: Iterable[Reading], labels: Labels) -> str:
    """Return the text of the newest readings, one block a metric.

    A missing metric has no line: that is how Prometheus knows it is missing (`absent()`). Whether a
    source gave anything at all is `tpukit_source_up`. Where two sources know the same metric, the
    first one counts: Prometheus refuses a text that says a series twice.
    """
    blocks: dict[str, list[str]] = {}
    written: set[str] = set()
    of_every_chip = _join({"make": labels.make, "model": labels.model, **labels.others})
    topology = _join({"tpu_topology": labels.tpu_topology})
    for reading in readings:
        host = _join({"host": reading.host, "process": str(reading.process)})
        up = f'{UP}{{source="{_escape(reading.source)}",{host}}} {1 if reading.samples else 0}'
        blocks.setdefault(UP, []).append(up)
        of_chip: dict[int, str] = {}
        for sample in reading.samples:
            known = METRICS.get(sample.metric)
            name = _NAMES.get(sample.metric, sample.metric)
            value = sample.value
            if sample.chip is None:
                text = host
            else:
                text = of_chip.get(sample.chip, "")
                if not text:
                    chip = f'accelerator_id="{_escape(reading.host)}-{sample.chip}"'
                    text = of_chip[sample.chip] = f"{chip},{of_every_chip},{topology},{host}"
                if known is not None and known.gke_name and known.unit == "share":
                    value *= 100
            if sample.labels:
                text = f"{text},{_join(sample.labels)}"
            series = f"{name}{{{text}}}"
            if series in written:
                continue
            written.add(series)
            if name not in blocks:
                blocks[name] = []
            blocks[name].append(f"{series} {value!r}")
    return "".join(
        f"{_HEADS.get(name, _head(name))}{chr(10).join(lines)}\n" for name, lines in blocks.items()
    )


def _head(name: str) -> str:
    return f"# TYPE {name} untyped\n"


def _join(labels: Mapping[str, str]) -> str:
    return ",".join(f'{name}="{_escape(value)}"' for name, value in labels.items())


def _escape(text: str) -> str:
    if "\\" in text or '"' in text or "\n" in text:
        return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    return text


_NAMES = {metric: prometheus_name(metric) for metric in METRICS}
_HEADS = {
    _NAMES[metric.name]: f"# HELP {_NAMES[metric.name]} {metric.meaning}\n"
    f"# TYPE {_NAMES[metric.name]} gauge\n"
    for metric in METRICS.values()
} | {UP: f"# HELP {UP} Whether a source of readings gave any number.\n# TYPE {UP} gauge\n"}

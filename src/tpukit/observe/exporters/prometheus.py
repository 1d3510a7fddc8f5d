"""Readings for Prometheus: the text, the server that it scrapes, and a Grafana dashboard.

GKE's own metrics keep its names, units (percent) and labels, so that dashboards made for GKE work.
A metric that GKE has no name for is called `tpukit_…` in base units. Metrics of Orbax and Grain
keep their names. prometheus_client could write the text too, but takes eight times as long for the
series of 512 chips, which is over the 20 ms that a scrape may take.
"""

import errno
import json
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from pathlib import Path

from ...errors import TPUValidationError
from ...hardware.detect import Accelerators, detect_accelerators
from ...hardware.slice import Slice
from ...hardware.topology import format_shape
from ...plain_data import JsonObject
from ...runtime.address import is_loopback, names_this_machine
from ..readings import METRICS, Reading

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SUFFIXES = {"B": "_bytes", "B/s": "_bytes_per_second", "share": "_ratio"}
UP = "tpukit_source_up"
PREFIX = "tpukit_"


@dataclass(frozen=True)
class Labels:
    """Labels of every chip: those of GKE's exporter, and those of a pod.

    Attributes:
        model: Kind of chip: "tpu-v6e-slice" for TPUs, as in GKE's node label.
        tpu_topology: Such as "2x2".
        make: "cloud-tpu", or "nvidia".
        others: `namespace`, `pod`, `container` …, where known.
    """

    model: str = ""
    tpu_topology: str = ""
    make: str = "cloud-tpu"
    others: Mapping[str, str] = field(default_factory=dict[str, str])


def prometheus_name(metric: str) -> str:
    """Return a metric's name in the text."""
    about = METRICS.get(metric)
    if about is None:
        return metric
    suffix = SUFFIXES.get(about.unit, "")
    return about.gke_name or f"{PREFIX}{metric}{'' if metric.endswith(suffix) else suffix}"


def write_text(readings: Iterable[Reading], labels: Labels) -> str:
    """Return the text of the newest readings, one block per metric.

    A missing metric has no line, which Prometheus sees as `absent()`. `tpukit_source_up` is 1 for a
    source with any number. Where two sources have the same metric, the first counts, because
    Prometheus refuses a text with a series twice.
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
            about = METRICS.get(sample.metric)
            name = _NAMES.get(sample.metric, sample.metric)
            value = sample.value
            if sample.chip is None:
                text = host
            else:
                text = of_chip.get(sample.chip, "")
                if not text:
                    chip = f'accelerator_id="{_escape(reading.host)}-{sample.chip}"'
                    text = of_chip[sample.chip] = f"{chip},{of_every_chip},{topology},{host}"
                if about is not None and about.gke_name and about.unit == "share":
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
} | {UP: f"# HELP {UP} Whether a source of readings has any number.\n# TYPE {UP} gauge\n"}


PORT = 9090
LOOPBACK = "127.0.0.1"
# Set by the downward API, where the pod's manifest requests it.
POD_VARIABLES = {"namespace": "POD_NAMESPACE", "pod": "POD_NAME"}


class PrometheusExporter:
    """Serves the newest reading of every source at `/metrics`.

    The text is made at a scrape and kept until the next readings.

    Args:
        port: Port to listen on; 0 takes any free one, which is then in `port`.
        address: The interface; the default serves this machine alone.
        labels: Labels of every chip; detected on this machine by default.

    Raises:
        TPUValidationError: The port is taken.
    """

    name = "prometheus"

    def __init__(
        self, port: int = PORT, *, address: str = LOOPBACK, labels: Labels | None = None
    ) -> None:
        self._labels = labels or detect_labels()
        self._newest: dict[tuple[str, int, str], Reading] = {}
        self._text: bytes | None = None
        self._lock = threading.Lock()
        exporter = self

        class Handler(_Handler):
            only_loopback = is_loopback(address)

            def text(self) -> bytes:
                return exporter.text()

        try:
            self._server = _ExporterServer((address, port), Handler)
        except OSError as error:
            raise TPUValidationError(
                f"port {port} of {address} cannot be listened on ({error.strerror}); "
                + (
                    "another program has it; choose another prometheus_port, or 0 for any free one."
                    if error.errno == errno.EADDRINUSE
                    else "choose another address or port."
                )
            ) from error
        self.address, self.port = address, int(self._server.server_address[1])
        # A long interval, because every poll wakes a CPU; shutting down may take as long.
        self._thread = threading.Thread(
            target=self._server.serve_forever,
            kwargs={"poll_interval": 0.5},
            name="prometheus exporter",
            daemon=True,
        )
        self._thread.start()

    @property
    def url(self) -> str:
        """The address of the text."""
        return f"http://{self.address}:{self.port}/metrics"

    def export(self, readings: Sequence[Reading]) -> None:
        """Replace the readings of these sources."""
        with self._lock:
            for reading in readings:
                self._newest[reading.host, reading.process, reading.source] = reading
            self._text = None

    def text(self) -> bytes:
        """Return the text for a scrape."""
        with self._lock:
            if self._text is None:
                self._text = write_text(self._newest.values(), self._labels).encode()
            return self._text

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _ExporterServer(ThreadingHTTPServer):
    daemon_threads = True
    # Two monitors on one port would share it silently, and each scrape would reach either.
    allow_reuse_port = False


class _Handler(BaseHTTPRequestHandler):
    timeout = 10  # seconds after which a silent client is disconnected
    server_version, sys_version = "tpukit", ""
    only_loopback = True

    def text(self) -> bytes:
        raise NotImplementedError

    def do_GET(self) -> None:
        """Answer a scrape."""
        if self.only_loopback and not names_this_machine(self.headers.get("Host", "")):
            self.send_error(421, "This server answers to 127.0.0.1 and localhost only.")
            return
        if self.path.split("?")[0] not in ("/metrics", "/"):
            self.send_error(404)
            return
        body = self.text()
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPE)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing for a scrape."""


def detect_labels(here: Accelerators | None = None) -> Labels:
    """Return the labels of this machine's chips."""
    accelerators = here or detect_accelerators()
    others = {
        label: os.environ[variable]
        for label, variable in POD_VARIABLES.items()
        if variable in os.environ
    }
    if accelerators.kind != "tpu":
        return Labels(make="nvidia" if accelerators.kind == "gpu" else "", others=others)
    if accelerators.slice_name is None:
        return Labels(model=accelerators.generation or "", others=others)
    part = Slice.parse(accelerators.slice_name)
    return Labels(
        model=part.chip.gke_accelerator or part.chip.name,
        tpu_topology=format_shape(part.topology),
        others=others,
    )


def load_dashboard() -> JsonObject:
    """Return the dashboard as Grafana's JSON."""
    file = resources.files(__package__ or "") / "data" / "grafana.json"
    return json.loads(file.read_text(encoding="utf-8"))


def write_dashboard(path: str | Path) -> Path:
    """Write the dashboard to a file, for Grafana's import or its provisioning folder."""
    target = Path(path)
    target.write_text(json.dumps(load_dashboard(), indent=1) + "\n", encoding="utf-8")
    return target

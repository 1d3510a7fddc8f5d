"""Metrics scraped from Prometheus endpoints: of Orbax and Grain, and of other hosts' monitors."""

import urllib.request
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from ...errors import TPUValidationError
from ..exporters.prometheus import prometheus_name
from ..readings import METRICS, Reading, ReadingBuilder, Sample, Source

URL = "http://localhost:9431/metrics"
TIMEOUT_S = 2.0
MOST_BYTES = 8 * 2**20
PREFIXES = ("jax_orbax_", "jax_checkpoint_", "grain_python_")
# Scrapes use no proxy.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class PrometheusSource(Source):
    """Scrapes a Prometheus endpoint; names are kept, histogram buckets are left out.

    Args:
        url: Address of the text; Orbax and Grain serve port 9431.
        prefixes: Prefixes of the metrics to read.
        timeout_s: Seconds for the response.
        process: Index of the process of the run.
    """

    name = "prometheus"

    def __init__(
        self,
        url: str = URL,
        *,
        prefixes: Iterable[str] = PREFIXES,
        timeout_s: float = TIMEOUT_S,
        process: int = 0,
    ) -> None:
        self.url, self._prefixes = url, tuple(prefixes)
        self._timeout_s, self._process = timeout_s, process
        self._known: tuple[str, ...] = tuple(prefix + "*" for prefix in self._prefixes)

    def read(self) -> Reading:
        """Scrape once; without a server, the metrics seen before are missing."""
        builder = ReadingBuilder(self.name, self._known, process=self._process)
        try:
            from prometheus_client.parser import text_string_to_metric_families
        except ImportError:
            return builder.build(
                otherwise="needs 'prometheus-client': pip install 'tpukit[monitor]'"
            )
        try:
            with _OPENER.open(self.url, timeout=self._timeout_s) as answer:
                text = answer.read(MOST_BYTES).decode("utf-8", errors="replace")
        except (OSError, ValueError) as error:
            why = getattr(error, "reason", None) or error
            return builder.build(otherwise=f"nothing is served at {self.url} ({why})")
        names: dict[str, None] = {}
        try:
            for family in text_string_to_metric_families(text):
                if not family.name.startswith(self._prefixes):
                    continue
                for sample in family.samples:
                    if sample.name.endswith(("_bucket", "_created")):
                        continue
                    names[sample.name] = None
                    builder.add(sample.name, sample.value, labels=sample.labels)
        except ValueError as error:
            return builder.build(otherwise=f"{self.url} serves no Prometheus text ({error})")
        if names:
            self._known = tuple(names)
        return builder.build(otherwise=f"{self.url} does not serve it")


PORT = 9090
# Metrics by their name in the text.
METRIC_OF = {prometheus_name(metric): metric for metric in METRICS}
OWN_LABELS = ("quantile", "buffer_size", "link")


class ScrapedHost:
    """A host whose monitor serves Prometheus text.

    Args:
        address: `host:port`, `host`, or a URL.

    Raises:
        TPUValidationError: It is no address.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        try:
            parts = urlsplit(address if "://" in address else f"//{address}")
            port = parts.port or PORT
        except ValueError:
            parts, port = None, PORT
        if parts is None or not parts.hostname or parts.scheme not in ("", "http", "https"):
            raise TPUValidationError(
                f"'{address}' is no host address; write host, host:port or http://host:port, "
                "or name a run directory."
            )
        name = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        path = parts.path if parts.path not in ("", "/") else "/metrics"
        url = f"{parts.scheme or 'http'}://{name}:{port}{path}"
        self._source = PrometheusSource(url, prefixes=("",))

    def read(self) -> list[Reading]:
        """Scrape once; without an answer, all metrics are missing, with the reason."""
        scraped = self._source.read()
        if not scraped.samples:
            why = next(iter(scraped.missing.values()), "it serves nothing")
            missing = {name: why for name, metric in METRICS.items() if metric.scope != "run"}
            return [Reading(scraped.time, self.address, 0, "prometheus", (), missing)]
        return readings_of(scraped, self.address)


def readings_of(scraped: Reading, address: str) -> list[Reading]:
    """Return a reading for each host in a scraped text, with names and units of `METRICS`."""
    by_host: dict[tuple[str, int], list[Sample]] = {}
    for sample in scraped.samples:
        labels = sample.labels
        process = labels.get("process", "0")
        host = labels.get("host") or address
        metric = METRIC_OF.get(sample.metric)
        if metric is None:
            continue
        chip = _chip(labels)
        about = METRICS[metric]
        is_percent = bool(about.gke_name) and about.unit == "share" and chip is not None
        by_host.setdefault((host, int(process) if process.isdecimal() else 0), []).append(
            Sample(
                metric,
                sample.value / 100 if is_percent else sample.value,
                chip,
                {name: labels[name] for name in OWN_LABELS if name in labels},
            )
        )
    return [
        Reading(scraped.time, host, process, "prometheus", tuple(samples))
        for (host, process), samples in by_host.items()
    ]


def _chip(labels: Mapping[str, str]) -> int | None:
    """Return the chip's index at the end of its id, as in "host-3"."""
    last = labels.get("accelerator_id", "").rpartition("-")[2]
    return int(last) if last.isdecimal() else None


def scrape(hosts: Iterable[ScrapedHost]) -> list[Reading]:
    """Scrape several hosts at once."""
    from concurrent.futures import ThreadPoolExecutor

    scraped = list(hosts)
    if not scraped:
        return []
    with ThreadPoolExecutor(max_workers=min(32, len(scraped))) as pool:
        return [reading for readings in pool.map(ScrapedHost.read, scraped) for reading in readings]

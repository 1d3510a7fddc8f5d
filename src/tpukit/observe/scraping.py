"""Other hosts' readings, scraped from the Prometheus endpoints that their monitors serve."""

from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from ..errors import TPUValidationError
from .exporters.prometheus_text import prometheus_name
from .readings import METRICS, Reading, Sample
from .sources.scraped import PrometheusSource

PORT = 9090
# What the text calls each metric, back to ours.
METRIC_OF = {prometheus_name(metric): metric for metric in METRICS}
OWN_LABELS = ("quantile", "buffer_size", "link")


class ScrapedHost:
    """A host whose monitor serves Prometheus text.

    Args:
        address: `host:port`, `host`, or a whole URL.

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
                f"'{address}' is no address of a host; write host, host:port or http://host:port, "
                "or name a run directory."
            )
        name = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
        path = parts.path if parts.path not in ("", "/") else "/metrics"
        url = f"{parts.scheme or 'http'}://{name}:{port}{path}"
        self._source = PrometheusSource(url, prefixes=("",))

    def read(self) -> list[Reading]:
        """Scrape once; a host that does not answer has everything missing, with the reason."""
        scraped = self._source.read()
        if not scraped.samples:
            why = next(iter(scraped.missing.values()), "it serves nothing")
            missing = {name: why for name, one in METRICS.items() if one.scope != "run"}
            return [Reading(scraped.time, self.address, 0, "prometheus", (), missing)]
        return readings_of(scraped, self.address)


def readings_of(scraped: Reading, address: str) -> list[Reading]:
    """Return a reading for each host that a scraped text speaks of, in our names and units."""
    found: dict[tuple[str, int], list[Sample]] = {}
    for sample in scraped.samples:
        labels = sample.labels
        process = labels.get("process", "0")
        host = labels.get("host") or address
        metric = METRIC_OF.get(sample.metric)
        if metric is None:
            continue
        chip = _chip(labels)
        known = METRICS[metric]
        is_percent = bool(known.gke_name) and known.unit == "share" and chip is not None
        found.setdefault((host, int(process) if process.isdecimal() else 0), []).append(
            Sample(
                metric,
                sample.value / 100 if is_percent else sample.value,
                chip,
                {name: labels[name] for name in OWN_LABELS if name in labels},
            )
        )
    return [
        Reading(scraped.time, host, process, "prometheus", tuple(samples))
        for (host, process), samples in found.items()
    ]


def _chip(labels: Mapping[str, str]) -> int | None:
    """Return the chip's index, which ends its id: "host-3"."""
    last = labels.get("accelerator_id", "").rpartition("-")[2]
    return int(last) if last.isdecimal() else None


def scrape(hosts: Iterable[ScrapedHost]) -> list[Reading]:
    """Scrape several hosts at once."""
    from concurrent.futures import ThreadPoolExecutor

    asked = list(hosts)
    if not asked:
        return []
    with ThreadPoolExecutor(max_workers=min(32, len(asked))) as pool:
        return [reading for found in pool.map(ScrapedHost.read, asked) for reading in found]

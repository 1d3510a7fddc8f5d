"""What Orbax and Grain expose in Prometheus's text format."""

import urllib.request
from collections.abc import Iterable

from ..readings import Reading, ReadingBuilder

URL = "http://localhost:9431/metrics"
TIMEOUT_S = 2.0
MOST_BYTES = 8 * 2**20
PREFIXES = ("jax_orbax_", "jax_checkpoint_", "grain_python_")
# A scrape of this host goes to no proxy.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class PrometheusSource:
    """Scrapes a server of metrics; names stay as they are, buckets of histograms are left out.

    Args:
        url: Where the text is served; Orbax and Grain do on port 9431.
        prefixes: Names that are taken.
        timeout_s: For the answer.
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
        """Scrape once; metrics seen before are missing by their names when the server is gone."""
        found = ReadingBuilder(self.name, self._known, process=self._process)
        try:
            from prometheus_client.parser import text_string_to_metric_families
        except ImportError:
            return found.build(otherwise="needs 'prometheus-client': pip install 'tpukit[monitor]'")
        try:
            with _OPENER.open(self.url, timeout=self._timeout_s) as answer:
                text = answer.read(MOST_BYTES).decode("utf-8", errors="replace")
        except (OSError, ValueError) as error:
            why = getattr(error, "reason", None) or error
            return found.build(otherwise=f"nothing is served at {self.url} ({why})")
        names: dict[str, None] = {}
        try:
            for family in text_string_to_metric_families(text):
                if not family.name.startswith(self._prefixes):
                    continue
                for sample in family.samples:
                    if sample.name.endswith(("_bucket", "_created")):
                        continue
                    names[sample.name] = None
                    found.add(sample.name, sample.value, labels=sample.labels)
        except ValueError as error:
            return found.build(otherwise=f"{self.url} serves no Prometheus text ({error})")
        if names:
            self._known = tuple(names)
        return found.build(otherwise=f"{self.url} does not serve it")

    def close(self) -> None:
        """Do nothing: each scrape is a connection of its own."""

"""Live monitors of other hosts as a run: what they serve is scraped and kept in a folder.

So a training loop that leaves no run directory here, or none at all, is read like any other run.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ...records.metrics import MetricsFile
from ...runtime.run_files import IDENTITY_FILE, METRICS_FILE
from ..exporters.jsonl import JsonlExporter
from ..readings import Reading
from ..scraping import ScrapedHost, scrape

logger = logging.getLogger(__name__)

NAME = "live hosts"
EVERY_S = 2.0
# What a record of metrics.jsonl calls what a monitor serves of a run.
RECORDED = {
    "loss": "loss",
    "step_time_seconds": "step_time_s",
    "tokens_per_second_per_chip": "tokens_per_s_per_chip",
    "mfu": "mfu",
    "input_stall_seconds": "input_stall_s",
}


class LiveHosts:
    """Keeps what the monitors of some hosts serve, until it is closed.

    Args:
        addresses: `host:port` of each; the first one whose monitor knows a step is the run's.
        folder: Where the run directory is made.
        every_s: Seconds between two scrapes.

    Raises:
        TPUValidationError: One is no address.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        folder: Path,
        *,
        every_s: float = EVERY_S,
        scrape_all: Callable[[Sequence[ScrapedHost]], list[Reading]] = scrape,
    ) -> None:
        self._hosts = [ScrapedHost(address) for address in addresses]
        self._every_s, self._scrape = every_s, scrape_all
        self.path = folder / NAME
        self.path.mkdir(parents=True)
        about = {"format": 1, "identity": {"hosts": list(addresses)}, "recipe": {}, "settings": {}}
        (self.path / IDENTITY_FILE).write_text(json.dumps(about) + "\n")
        self._metrics = MetricsFile(self.path / METRICS_FILE)
        self._step = 0.0
        self._exporters: dict[tuple[str, int], JsonlExporter] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="live hosts", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Scrape no more."""
        self._ended.set()
        self._thread.join()
        for exporter in self._exporters.values():
            exporter.close()
        self._metrics.close()

    def keep(self, readings: Sequence[Reading]) -> None:
        """Write readings down as those of the run's hosts, and a step that is new."""
        for reading in readings:
            # Monitors of programs that are no job all call themselves process 0.
            key = reading.host, reading.process
            if key not in self._exporters:
                number = len(self._exporters)
                self._exporters[key] = JsonlExporter(self.path, process=number, every_s=0.0)
            self._exporters[key].export([reading])
        values = [{one.metric: one.value for one in reading.samples} for reading in readings]
        newest = next((found for found in values if found.get("step")), None)
        if newest is None or newest["step"] == self._step:
            return
        if newest["step"] < self._step:  # it went back, or another run began
            self._metrics.roll_back(int(newest["step"]) - 1)
        self._step = newest["step"]
        record = {ours: newest.get(name) for name, ours in RECORDED.items()}
        self._metrics.write({"step": int(self._step), **record, "time": time.time()})

    def _watch(self) -> None:
        while True:
            try:
                self.keep(self._scrape(self._hosts))
            except OSError as error:  # the disk is full: the next round may find room
                logger.warning("What live hosts serve cannot be kept: %s", error)
            if self._ended.wait(self._every_s):
                return

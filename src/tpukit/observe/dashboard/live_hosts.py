"""Live monitors of other hosts as a run: their metrics are scraped into a run directory.

So a training loop without a run directory on this machine is shown like any other run.
"""

import json
import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ...records.metrics import MetricsFile
from ...records.names import IDENTITY_FILE, METRICS_FILE, STEP, TIME
from ..exporters.files import JsonlExporter
from ..readings import RECORDED_AS, Reading
from ..sources.prometheus import ScrapedHost, scrape

logger = logging.getLogger(__name__)

NAME = "live hosts"
EVERY_S = 2.0


class LiveHosts:
    """Scrapes the monitors of some hosts into a run directory, until it is closed.

    Args:
        addresses: `host:port` of each; the first monitor with a step gives the run's figures.
        folder: Parent folder of the run directory.
        every_s: Seconds between two scrapes.

    Raises:
        TPUValidationError: An address is not valid.
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
        """Stop scraping."""
        self._ended.set()
        self._thread.join()
        for exporter in self._exporters.values():
            exporter.close()
        self._metrics.close()

    def keep(self, readings: Sequence[Reading]) -> None:
        """Write readings of the run's hosts, and a record if the step is new."""
        for reading in readings:
            # Monitors of programs that are no job all have process 0.
            key = reading.host, reading.process
            if key not in self._exporters:
                number = len(self._exporters)
                self._exporters[key] = JsonlExporter(self.path, process=number, every_s=0.0)
            self._exporters[key].export([reading])
        values = [
            {sample.metric: sample.value for sample in reading.samples} for reading in readings
        ]
        newest = next((found for found in values if found.get("step")), None)
        if newest is None or newest["step"] == self._step:
            return
        if newest["step"] < self._step:  # rolled back, or another run began
            self._metrics.roll_back(int(newest["step"]) - 1)
        self._step = newest["step"]
        record = {ours: newest.get(name) for name, ours in RECORDED_AS.items()}
        self._metrics.write({**record, STEP: int(self._step), TIME: time.time()})

    def _watch(self) -> None:
        while True:
            try:
                self.keep(self._scrape(self._hosts))
            except OSError as error:  # a full disk; the next round may have room
                logger.warning("metrics of live hosts cannot be written: %s", error)
            if self._ended.wait(self._every_s):
                return

"""Exports guarded: one that fails is logged once, and tried again with every round."""

import logging
from collections.abc import Sequence

from ..exporters.protocol import Exporter
from ..readings import Reading

logger = logging.getLogger(__name__)


class GuardedExporters:
    """Hands each round to every exporter; a full disk or a lost network stops none of the rest."""

    def __init__(self, exporters: Sequence[Exporter]) -> None:
        self._exporters = list(exporters)
        self._failing: dict[int, int] = {}

    def export(self, readings: Sequence[Reading]) -> None:
        """Hand on a round of readings; raises nothing."""
        for exporter in self._exporters:
            key = id(exporter)
            try:
                exporter.export(readings)
            except Exception as error:  # noqa: BLE001 - whatever it is, the training goes on
                if key not in self._failing:
                    logger.warning(
                        "the %s exporter fails (%s); it is tried again with every reading, and "
                        "this is said once",
                        exporter.name,
                        error,
                    )
                self._failing[key] = self._failing.get(key, 0) + 1
            else:
                lost = self._failing.pop(key, 0)
                if lost:
                    logger.warning(
                        "the %s exporter works again; %d rounds of readings were lost",
                        exporter.name,
                        lost,
                    )

    def close(self) -> None:
        """Close every exporter."""
        for exporter in self._exporters:
            try:
                exporter.close()
            except Exception as error:  # noqa: BLE001 - the others are to be closed too
                logger.warning("the %s exporter could not be closed: %s", exporter.name, error)

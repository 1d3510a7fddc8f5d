"""Readings as TensorBoard scalars, over the time since the first."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ...errors import MissingExtraError
from ..readings import Reading


class TensorBoardExporter:
    """Writes every number under `monitor/<metric>`, chips apart; steps are seconds.

    Args:
        log_dir: Where the event file goes.

    Raises:
        MissingExtraError: tensorboardX is not installed.
    """

    name = "tensorboard"

    def __init__(self, log_dir: str | Path) -> None:
        try:
            import tensorboardX
        except ImportError:
            raise MissingExtraError(
                "tensorboard", needed_for="the TensorBoard exporter", module="tensorboardX"
            ) from None
        self._writer: Any = tensorboardX.SummaryWriter(str(log_dir))
        self._began: float | None = None

    def export(self, readings: Sequence[Reading]) -> None:
        """Add the numbers."""
        for reading in readings:
            if self._began is None:
                self._began = reading.time
            step = max(0, round(reading.time - self._began))
            for sample in reading.samples:
                parts = [sample.metric, *sample.labels.values()]
                if sample.chip is not None:
                    parts.append(f"chip {sample.chip}")
                tag = f"monitor/{'/'.join(parts)}"
                self._writer.add_scalar(tag, sample.value, step, walltime=reading.time)

    def close(self) -> None:
        """Close the event file."""
        self._writer.close()

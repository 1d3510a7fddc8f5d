"""Metrics as TensorBoard event files, written by tensorboardX (no TensorFlow)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import MissingExtraError
from .hook import RunEnd


class TensorBoardHook:
    """Writes every number of every record; look at it with `tensorboard --logdir RUN_DIR`.

    Args:
        log_dir: Where to; `tensorboard/` in the run directory by default.
    """

    def __init__(self, log_dir: str | Path | None = None) -> None:
        try:
            import tensorboardX
        except ImportError:
            raise MissingExtraError(
                "tensorboard", needed_for="the TensorBoard hook", module="tensorboardX"
            ) from None
        self._module: Any = tensorboardX
        self._log_dir = log_dir
        self._writer: Any = None

    def on_start(self, run_dir: Path, identity: Mapping[str, Any]) -> None:
        """Open the event file."""
        folder = Path(self._log_dir) if self._log_dir else run_dir / "tensorboard"
        self._writer = self._module.SummaryWriter(str(folder))

    def on_record(self, record: Mapping[str, Any]) -> None:
        """Add the record's numbers."""
        for name, value in record.items():
            if isinstance(value, float) and name != "time":
                self._writer.add_scalar(name, value, record["step"], walltime=record.get("time"))

    def on_end(self, result: RunEnd | None) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()

"""Metrics to Weights & Biases."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import MissingExtraError
from .hook import RunEnd


class WandbHook:
    """Logs every record; `WANDB_MODE=offline` keeps it on this machine.

    Args:
        project: The project it belongs to; wandb's own settings decide when left out.
    """

    def __init__(self, project: str | None = None) -> None:
        try:
            import wandb  # pyright: ignore[reportMissingImports]  an extra
        except ImportError:
            raise MissingExtraError(
                "wandb", needed_for="the Weights & Biases hook", module="wandb"
            ) from None
        self._module: Any = wandb
        self._project = project
        self._run: Any = None

    def on_start(self, run_dir: Path, identity: Mapping[str, Any]) -> None:
        """Start a run, or go on with the one of this folder."""
        self._run = self._module.init(
            project=self._project,
            name=run_dir.name,
            id=run_dir.name,
            resume="allow",
            dir=str(run_dir),
            config=dict(identity),
            allow_val_change=True,  # a run may go on with another learning rate
        )

    def on_record(self, record: Mapping[str, Any]) -> None:
        """Log the record at its step."""
        self._run.log(dict(record), step=record["step"])

    def on_end(self, result: RunEnd | None) -> None:
        """Finish the run, as failed when there is no result."""
        if self._run is not None:
            self._run.finish(exit_code=0 if result is not None else 1)

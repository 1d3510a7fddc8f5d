"""A trace of a few steps, as XProf and TensorBoard read it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .hook import RunEnd

SKIPPED, TRACED = 2, 3  # records: the first steps still warm up, and traces are large
FOLDER = "profile"


class ProfileHook:
    """Traces three steps of a run into `profile/` of its folder."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._seen = 0
        self._tracing = False

    def on_start(self, run_dir: Path, identity: Mapping[str, Any]) -> None:
        """Remember where to write."""
        self._folder, self._seen = run_dir / FOLDER, 0

    def on_record(self, record: Mapping[str, Any]) -> None:
        """Start the trace after the first steps, and stop it a few later."""
        import jax

        self._seen += 1
        if self._seen == SKIPPED and self._folder is not None:
            jax.profiler.start_trace(str(self._folder))
            self._tracing = True
        elif self._tracing and self._seen >= SKIPPED + TRACED:
            self._stop()

    def on_end(self, result: RunEnd | None) -> None:
        """Stop, where the run ended before."""
        self._stop()

    def _stop(self) -> None:
        if self._tracing:
            import jax

            jax.profiler.stop_trace()
            self._tracing = False

"""Resize a supervised job by the decisions of an `AutoScaler`."""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from ...errors import TPUError, TPUValidationError
from ...records.metrics import read_metrics
from ...runtime.ranges import SECONDS
from ..config import PodConfig
from .autoscaler import AutoScaler, ScalingDecision
from .metrics import WorkloadMetrics

logger = logging.getLogger(__name__)
LOOK_EVERY_S = 60.0


class Resizable(Protocol):
    """A job that can continue on another pod, such as a `Supervisor`."""

    def resize(self, config: PodConfig) -> None:
        """Save, stop, request the pod, reshard and resume."""
        ...


class JobScaling:
    """Resizes a supervised job from a thread.

    ```python
    with JobScaling(scaler, "runs/one", supervisor, config):
        outcome = supervisor.run()
    ```

    Args:
        scaler: Makes the decisions.
        run_dir: The job's run directory, with its metrics.
        job: The job.
        config: The job's first pod.
        steps: Total number of steps, if known; the remaining ones must recover the cost of a
            change.
        every_s: Seconds between two decisions.
        tell: Called with each decision that is applied.
    """

    def __init__(
        self,
        scaler: AutoScaler,
        run_dir: str | Path,
        job: Resizable,
        config: PodConfig,
        *,
        steps: int | None = None,
        every_s: float = LOOK_EVERY_S,
        tell: Callable[[ScalingDecision], None] | None = None,
    ) -> None:
        self.config = config
        self._scaler, self._run_dir, self._job = scaler, run_dir, job
        self._steps, self._tell = steps, tell or (lambda decision: None)
        self._every_s = SECONDS.check("every_s", every_s)
        self._since = time.time()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="scaling", daemon=True)

    def look(self) -> ScalingDecision | None:
        """Decide once and apply the decision; return None if nothing was measured yet."""
        try:
            metrics = WorkloadMetrics.from_current_training(
                self._run_dir, config=self.config, since=self._since, remaining_steps=self._left()
            )
        except TPUValidationError:  # the pod's first steps are not complete
            return None
        decision = self._scaler.evaluate_scaling(metrics)
        if decision.config is not None:
            logger.info("resizing a job", extra={"to": str(decision.config.slice)})
            self.config, self._since = decision.config, time.time()
            self._job.resize(decision.config)
            self._tell(decision)
        return decision

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopped.set()
        self._thread.join()

    def _left(self) -> int | None:
        if self._steps is None:
            return None
        records = read_metrics(self._run_dir)
        return max(0, self._steps - (records[-1]["step"] if records else 0))

    def _watch(self) -> None:
        while not self._stopped.wait(self._every_s):
            try:
                self.look()
            except TPUError as error:
                logger.warning("the size of the job could not be chosen: %s", error)

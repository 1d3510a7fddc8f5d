"""Pods that may be taken away: what is done then (document 004)."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Self

from ..errors import TPUError
from ..runtime.ranges import SECONDS
from .calls import either_way
from .config import PodConfig
from .pod import Pod
from .store.records import split_pod_name

if TYPE_CHECKING:
    from .manager import TpuManager

POLL_S = 5.0
logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PreemptionHandler:
    """What happens when a pod is taken away, in keywords or step by step.

    ```python
    PreemptionHandler().with_checkpoint_frequency(300).with_auto_restart(True).build()
    ```

    Attributes:
        checkpoint_frequency_s: How often training saves: what a loss may cost at most.
        auto_restart: Whether another pod is asked for in its place.
        on_preemption: Called with the pod that was taken away.
        on_restart: Called with the pod that came in its place.
        poll_s: How often to look.
    """

    checkpoint_frequency_s: float = 300.0
    auto_restart: bool = True
    on_preemption: Callable[[Pod], None] | None = None
    on_restart: Callable[[Pod], None] | None = None
    poll_s: float = POLL_S
    _stopped: threading.Event = field(default_factory=threading.Event, repr=False, init=False)
    _threads: list[threading.Thread] = field(
        default_factory=list[threading.Thread], repr=False, init=False
    )

    def with_checkpoint_frequency(self, every: float | timedelta) -> Self:
        """Save this often: seconds, or a timedelta."""
        seconds = every.total_seconds() if isinstance(every, timedelta) else every
        return replace(self, checkpoint_frequency_s=SECONDS.check("checkpoint_frequency", seconds))

    def with_auto_restart(self, auto_restart: bool = True) -> Self:
        """Ask for another pod when one is taken away."""
        return replace(self, auto_restart=auto_restart)

    def with_callbacks(
        self,
        on_preemption: Callable[[Pod], None] | None = None,
        on_restart: Callable[[Pod], None] | None = None,
    ) -> Self:
        """Call these."""
        return replace(self, on_preemption=on_preemption, on_restart=on_restart)

    def build(self) -> Self:
        """Return it; everything was checked as it was given."""
        return self

    def is_checkpoint_due(self, seconds_since_last: float) -> bool:
        """Tell whether it is time to save."""
        return seconds_since_last >= self.checkpoint_frequency_s

    def watch(self, manager: "TpuManager", pod: Pod) -> None:
        """Look after a pod from a thread, until it is released or `stop` is called."""
        thread = threading.Thread(
            target=self._watch, args=(manager, pod), name=f"watch-{pod.name}", daemon=True
        )
        self._threads.append(thread)
        thread.start()

    def stop(self) -> None:
        """Look after nothing any more; no callback is called after it."""
        self._stopped.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _watch(self, manager: "TpuManager", pod: Pod) -> None:
        run, is_there = split_pod_name(pod.name)[0], True
        while not self._stopped.wait(self.poll_s):
            try:
                row = manager.store.wanted.find(run)
                if row is None or row.is_released:
                    return
                if not self.auto_restart and _is_lost(manager, pod):
                    manager.store.wanted.release(run)
                manager.reconciler.run_pass()
                row = manager.store.wanted.find(run)
            except TPUError as error:
                logger.warning("%s could not be looked at: %s", run, error)
                continue
            seen = None if row is None else row.pod
            if is_there and (seen is None or seen.name != pod.name):
                is_there = False
                _call(self.on_preemption, pod)
            if not is_there and seen is not None and seen.is_ready:
                pod, is_there = seen, True
                _call(self.on_restart, pod)


def _call(callback: Callable[[Pod], None] | None, pod: Pod) -> None:
    if callback is not None:
        callback(pod)


def _is_lost(manager: "TpuManager", pod: Pod) -> bool:
    seen = manager.opened.get(pod.name, zone=pod.zone)
    return seen is None or seen.state.is_lost


@dataclass(frozen=True)
class PreemptibleManager:
    """Gets pods that may be taken away, and looks after them with one handler."""

    manager: "TpuManager"
    handler: PreemptionHandler = field(default_factory=PreemptionHandler)

    @either_way
    def allocate_pod(self, config: PodConfig) -> Pod:
        """Get a spot pod that the handler looks after."""
        return self.manager.allocate_preemptible_pod(config, self.handler)

    def close(self) -> None:
        """Look after nothing any more; the pods stay."""
        self.handler.stop()

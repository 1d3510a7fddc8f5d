"""Preemptible pods and the thread that watches them (document 004)."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..errors import TPUError
from ..runtime.calls import either_way
from .config import PodConfig
from .pod import Pod
from .store.records import split_pod_name
from .supervision.policy import PreemptionHandler

if TYPE_CHECKING:
    from .manager import TpuManager

POLL_S = 5.0
logger = logging.getLogger(__name__)


class PreemptionWatch:
    """Watches one pod from a thread until it is released or `stop` is called.

    Args:
        manager: The manager that allocated the pod and allocates its replacement.
        pod: The pod.
        handler: Its callbacks are called when the pod is preempted and replaced.
        poll_s: Seconds between two queries.
    """

    def __init__(
        self, manager: "TpuManager", pod: Pod, handler: PreemptionHandler, *, poll_s: float = POLL_S
    ) -> None:
        self._manager, self._pod, self._handler, self._poll_s = manager, pod, handler, poll_s
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"watch-{pod.name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop watching. No callback is called afterwards."""
        self._stopped.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        run, is_there = split_pod_name(self._pod.name)[0], True
        store = self._manager.store
        while not self._stopped.wait(self._poll_s):
            try:
                row = store.wanted.find(run)
                if row is None or row.is_released:
                    return
                if not self._handler.auto_restart and self._is_lost():
                    store.wanted.release(run)
                self._manager.reconciler.run_pass()
                row = store.wanted.find(run)
            except TPUError as error:
                logger.warning("%s could not be queried: %s", run, error)
                continue
            seen = None if row is None else row.pod
            if is_there and (seen is None or seen.name != self._pod.name):
                is_there = False
                _call(self._handler.on_preemption, self._pod)
            if not is_there and seen is not None and seen.is_ready:
                self._pod, is_there = seen, True
                _call(self._handler.on_restart, seen)

    def _is_lost(self) -> bool:
        seen = self._manager.opened.get(self._pod.name, zone=self._pod.zone)
        return seen is None or seen.state.is_lost


def _call(callback: Callable[[Pod], None] | None, pod: Pod) -> None:
    if callback is not None:
        callback(pod)


@dataclass(frozen=True)
class PreemptibleManager:
    """Allocates preemptible pods and watches all of them with one handler."""

    manager: "TpuManager"
    handler: PreemptionHandler = field(default_factory=PreemptionHandler)

    @either_way
    def allocate_pod(self, config: PodConfig) -> Pod:
        """Allocate a spot pod and watch it."""
        return self.manager.allocate_preemptible_pod(config, self.handler)

    def close(self) -> None:
        """Stop watching; the pods themselves stay."""
        self.manager.close()

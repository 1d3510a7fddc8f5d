"""Pods that may be taken away, and what is done then (document 004)."""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..errors import TPUError
from .calls import either_way
from .config import PodConfig
from .pod import Pod
from .store.records import split_pod_name
from .supervision.preemption import PreemptionHandler

if TYPE_CHECKING:
    from .manager import TpuManager

POLL_S = 5.0
logger = logging.getLogger(__name__)

PodCallback = Callable[[Pod], None]


class PodWatch:
    """Looks after a spot pod from a thread, until it is given back or `close` is called.

    Args:
        manager: Whose pod it is.
        pod: As it was allocated.
        handler: Whether another one is asked for when it is taken away.
        on_preemption: Called with the pod that was taken away.
        on_restart: Called with the pod that came in its place.
        poll_s: How often to look.
    """

    def __init__(
        self,
        manager: "TpuManager",
        pod: Pod,
        handler: PreemptionHandler,
        *,
        on_preemption: PodCallback | None = None,
        on_restart: PodCallback | None = None,
        poll_s: float = POLL_S,
    ) -> None:
        self._manager, self._handler, self._poll_s = manager, handler, poll_s
        self._on_preemption, self._on_restart = on_preemption, on_restart
        self._closed = threading.Event()
        self._thread = threading.Thread(
            target=self._watch, args=(pod,), name=f"watch-{pod.name}", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """Look no more; nothing is called after it. The pod stays."""
        self._closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _watch(self, pod: Pod) -> None:
        wanted = self._manager.store.wanted
        run, is_there = split_pod_name(pod.name)[0], True
        while not self._closed.wait(self._poll_s):
            try:
                row = wanted.find(run)
                if row is None or row.is_released:
                    return
                if not self._handler.auto_restart and self._is_lost(pod):
                    wanted.release(run)
                self._manager.reconciler.run_pass(only=row.provider)
                row = wanted.find(run)
            except TPUError as error:
                logger.warning("%s could not be looked at: %s", run, error)
                continue
            seen = None if row is None else row.pod
            if is_there and (seen is None or seen.name != pod.name):
                is_there = False
                _call(self._on_preemption, pod)
            if not is_there and seen is not None and seen.is_ready:
                pod, is_there = seen, True
                _call(self._on_restart, pod)

    def _is_lost(self, pod: Pod) -> bool:
        seen = self._manager.opened.get(pod.name, zone=pod.zone)
        return seen is None or seen.state.is_lost


def _call(callback: PodCallback | None, pod: Pod) -> None:
    if callback is not None:
        callback(pod)


@dataclass(frozen=True)
class PreemptibleManager:
    """Gets pods that may be taken away, and looks after them in one way."""

    manager: "TpuManager"
    handler: PreemptionHandler = field(default_factory=PreemptionHandler)
    on_preemption: PodCallback | None = None
    on_restart: PodCallback | None = None

    @either_way
    def allocate_pod(self, config: PodConfig) -> Pod:
        """Get a spot pod that is looked after."""
        return self.manager.allocate_preemptible_pod(
            config,
            self.handler,
            on_preemption=self.on_preemption,
            on_restart=self.on_restart,
        )

    def close(self) -> None:
        """Look after nothing any more; the pods stay."""
        self.manager.close()

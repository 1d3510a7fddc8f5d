"""The thread in which all controllers of a cluster work, one after another, until all is settled.

A controller is told of every change and says which objects it wants to look at; it is called
with these outside the change itself. So what one controller writes is seen by the others next.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from ..store import Change, Key, Store

Later = Callable[[float, Callable[[], object]], object]


class Controller(Protocol):
    """Brings what is nearer to what is wanted."""

    def wants(self, change: Change) -> Sequence[Key]:
        """Return the keys to look at after a change; called while it happens, so it is quick."""
        ...

    def reconcile(self, key: Key) -> None:
        """Look at one key. It may be called again, and for what is gone."""
        ...


class Worker:
    """Calls controllers for what they want to look at, each key once however often it changed."""

    def __init__(self, store: Store, controllers: Sequence[Controller]) -> None:
        self._store = store
        self._controllers = controllers
        self._queues: list[dict[Key, None]] = [{} for _ in controllers]
        self._wake = threading.Condition()
        self._busy = False
        self._open = True
        self._stop_listening = store.listen(self._heard)
        self._thread = threading.Thread(target=self._run, name="emulated-controllers", daemon=True)
        self._thread.start()

    def enqueue(self, controller: Controller, key: Key) -> None:
        """Let a controller look at a key."""
        with self._wake:
            self._queues[self._controllers.index(controller)][key] = None
            self._wake.notify_all()

    def settle(self, timeout_s: float = 10.0) -> bool:
        """Wait until no controller has anything to look at; return whether that came."""
        with self._wake:
            return self._wake.wait_for(lambda: not self._busy and not any(self._queues), timeout_s)

    def close(self) -> None:
        """End the thread."""
        self._stop_listening()
        with self._wake:
            self._open = False
            self._wake.notify_all()
        self._thread.join()

    def _heard(self, change: Change) -> None:
        wanted = [controller.wants(change) for controller in self._controllers]
        if not any(wanted):
            return
        with self._wake:
            for queue, keys in zip(self._queues, wanted, strict=True):
                queue.update(dict.fromkeys(keys))
            self._wake.notify_all()

    def _run(self) -> None:
        while True:
            with self._wake:
                self._busy = False
                self._wake.notify_all()
                self._wake.wait_for(lambda: any(self._queues) or not self._open)
                if not self._open:
                    return
                self._busy = True
                index = next(number for number, queue in enumerate(self._queues) if queue)
                key = next(iter(self._queues[index]))
                del self._queues[index][key]
            with self._store.lock:
                self._controllers[index].reconcile(key)


def no_keys() -> list[Key]:
    """Return no keys."""
    return []

"""Which tensors are alive and how large: counted by their storages, without keeping any alive."""

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

MOST_RECORDS = 100_000
"""Records kept at most, however long they are to be remembered."""


class AllocationRecord(NamedTuple):
    """One allocation or its end.

    Attributes:
        at_s: When, by the manager's clock.
        event: "allocate" or "free".
        size_bytes: How much.
        allocated_bytes: How much was allocated after it.
    """

    at_s: float
    event: Literal["allocate", "free"]
    size_bytes: int
    allocated_bytes: int


class AllocationLedger:
    """Counts the bytes of storages from their making until torch frees them.

    A storage lives as long as any tensor, view or numpy array uses it. Its death is only noted by
    the garbage collector's thread, and booked at the next question: booking it there could come
    in the middle of another booking.
    """

    def __init__(self, *, retention_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._retention_s, self._clock = retention_s, clock
        self._alive: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._died: deque[tuple[int, float]] = deque()
        self._history: deque[AllocationRecord] = deque(maxlen=MOST_RECORDS)
        self._lock = threading.RLock()
        self._allocated = self._peak = self._count = 0
        died = self._died  # and not the ledger: tensors may outlive it
        self._note_death: Callable[[weakref.ref[Any]], None] = lambda reference: died.append(
            (id(reference), clock())
        )

    def add(self, storage: Any, size_bytes: int) -> None:
        """Count a new storage until it dies."""
        reference = weakref.ref(storage, self._note_death)
        with self._lock:
            self._settle()
            self._alive[id(reference)] = reference, size_bytes
            self._allocated += size_bytes
            self._peak = max(self._peak, self._allocated)
            self._count += 1
            self._record("allocate", size_bytes, self._clock())

    @property
    def allocated_bytes(self) -> int:
        """Bytes that are alive."""
        with self._lock:
            self._settle()
            return self._allocated

    @property
    def peak_bytes(self) -> int:
        """The most that was alive at once."""
        with self._lock:
            return self._peak

    @property
    def allocations(self) -> int:
        """How many storages were made."""
        return self._count

    @property
    def alive(self) -> int:
        """How many storages are alive."""
        with self._lock:
            self._settle()
            return len(self._alive)

    def history(self) -> list[AllocationRecord]:
        """What happened within the time that is remembered, oldest first."""
        with self._lock:
            self._settle()
            self._forget(self._clock())
            return list(self._history)

    def _settle(self) -> None:
        while self._died:
            number, when = self._died.popleft()
            _, size_bytes = self._alive.pop(number)
            self._allocated -= size_bytes
            self._record("free", size_bytes, when)

    def _record(self, event: Literal["allocate", "free"], size_bytes: int, when: float) -> None:
        self._history.append(AllocationRecord(when, event, size_bytes, self._allocated))
        self._forget(when)

    def _forget(self, now: float) -> None:
        while self._history and now - self._history[0].at_s > self._retention_s:
            self._history.popleft()

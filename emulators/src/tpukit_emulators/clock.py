"""Time for emulators: it passes by itself, faster if wanted, or only when it is told to.

Whatever happens later in an emulator is a call that its clock makes, so a test that drives the
clock sees hours pass in no time, and always in the same order.
"""

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

logger = logging.getLogger(__name__)


class Later:
    """A call that a clock will make, unless it is cancelled."""

    def __init__(self, at: float, action: Callable[[], object]) -> None:
        self.at = at
        self.action: Callable[[], object] | None = action

    def cancel(self) -> None:
        """Do not make the call; one that was made already is no error."""
        self.action = None

    def run(self) -> None:
        """Make the call, once."""
        action, self.action = self.action, None
        if action is not None:
            action()


class Clock(Protocol):
    """What emulators need of time."""

    def now(self) -> float:
        """Return seconds since the epoch."""
        ...

    def call_later(self, delay_s: float, action: Callable[[], object]) -> Later:
        """Call `action` once so much time has passed, in a thread of the clock."""
        ...

    def close(self) -> None:
        """Make no further call."""
        ...


class _Agenda:
    """Calls in the order of their time, and for the same time in the order they were asked for."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Later]] = []
        self._order = itertools.count()

    def add(self, later: Later) -> None:
        heapq.heappush(self._heap, (later.at, next(self._order), later))

    def next_at(self) -> float | None:
        return self._heap[0][0] if self._heap else None

    def take(self, now: float) -> Later | None:
        """Remove and return the next call that is due, or None."""
        if self._heap and self._heap[0][0] <= now:
            return heapq.heappop(self._heap)[2]
        return None

    def clear(self) -> None:
        self._heap.clear()


class RealClock:
    """A clock that runs by itself, `rate` times as fast as others."""

    def __init__(self, rate: float = 1.0) -> None:
        self._rate = rate
        self._began, self._began_monotonic = time.time(), time.monotonic()
        self._agenda = _Agenda()
        self._changed = threading.Condition()
        self._open = True
        self._thread = threading.Thread(target=self._run, name="emulator-clock", daemon=True)
        self._thread.start()

    def now(self) -> float:
        """Return seconds since the epoch, counted faster from when the clock was made."""
        return self._began + (time.monotonic() - self._began_monotonic) * self._rate

    def call_later(self, delay_s: float, action: Callable[[], object]) -> Later:
        """Call `action` in the clock's thread once so much time has passed."""
        later = Later(self.now() + delay_s, action)
        with self._changed:
            self._agenda.add(later)
            self._changed.notify()
        return later

    def close(self) -> None:
        """End the clock's thread, once it has made the call that it is at."""
        with self._changed:
            self._open = False
            self._agenda.clear()
            self._changed.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                due = None
                while self._open and (due := self._agenda.take(self.now())) is None:
                    at = self._agenda.next_at()
                    self._changed.wait(None if at is None else (at - self.now()) / self._rate)
                if due is None:
                    return
            try:
                due.run()
            except Exception:  # one thing that goes wrong must not stop time for all others
                logger.exception("A call of the emulator's clock failed")


class DrivenClock:
    """A clock that stands still until `advance`, which makes the calls that fall due on the way."""

    def __init__(self, start: float = 1_800_000_000.0) -> None:
        self._now = start
        self._agenda = _Agenda()
        self._lock = threading.Lock()  # of the agenda; calls are made without it
        self._advancing = threading.RLock()

    def now(self) -> float:
        """Return seconds since the epoch, as far as the clock was driven."""
        return self._now

    def call_later(self, delay_s: float, action: Callable[[], object]) -> Later:
        """Call `action` when the clock is driven past that time."""
        later = Later(self._now + delay_s, action)
        with self._lock:
            self._agenda.add(later)
        return later

    def advance(self, seconds: float) -> None:
        """Let time pass, and make each call that falls due when it is due."""
        with self._advancing:
            end = self._now + seconds
            while True:
                with self._lock:
                    due = self._agenda.take(end)
                if due is None:
                    break
                self._now = max(self._now, due.at)
                due.run()
            self._now = end

    def close(self) -> None:
        """Make no further call."""
        with self._lock:
            self._agenda.clear()

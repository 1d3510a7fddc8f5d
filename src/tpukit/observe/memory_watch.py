"""Call a function at even intervals: the loop behind every watch of memory or chips."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from ..errors import TPUValidationError

Reading = TypeVar("Reading")


def watch(
    read: Callable[[], Reading],
    *,
    interval_s: float,
    duration_s: float,
    on_reading: Callable[[Reading], None] | None = None,
    stop: threading.Event | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> list[Reading]:
    """Take a reading now and every `interval_s`, until `duration_s` have passed.

    Readings keep to the interval's grid. A slow reading delays no other one; only the readings that
    fall into its time are skipped. Ctrl-C, and `stop` set by another thread, end the watch early
    with the readings taken until then.

    Args:
        read: Takes one reading.
        interval_s: Seconds between the beginnings of two readings.
        duration_s: Seconds from the first reading to the last; 0 takes one.
        on_reading: Called with each reading as it is taken.
        stop: Ends the watch when set.
        clock: A clock in seconds.

    Raises:
        TPUValidationError: The interval is not above 0, or the duration below it.

    Example:
        >>> peak = max(stats.allocated_memory for stats in watch(read, interval_s=1, duration_s=60))
    """
    readings: list[Reading] = []
    try:
        for _ in ticks(interval_s, duration_s=duration_s, stop=stop, clock=clock):
            readings.append(read())
            if on_reading is not None:
                on_reading(readings[-1])
    except KeyboardInterrupt:
        return readings
    return readings


def ticks(
    interval_s: float,
    *,
    duration_s: float = math.inf,
    stop: threading.Event | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[float]:
    """Yield the seconds passed, now and at every `interval_s`, until the end or `stop`.

    Times keep to the interval's grid, however long the caller takes for each.

    Raises:
        TPUValidationError: The interval is not above 0, or the duration below it.
    """
    if not interval_s > 0 or not duration_s >= 0:
        raise TPUValidationError(
            f"interval={interval_s:g} s and duration={duration_s:g} s are not valid; give an "
            "interval above 0 and a duration of at least 0."
        )
    ended = stop or threading.Event()
    began = clock()
    passed = 0.0
    while True:
        yield passed
        passed = clock() - began
        next_at = (passed // interval_s + 1) * interval_s
        if next_at > duration_s or ended.wait(next_at - passed):
            return
        passed = next_at

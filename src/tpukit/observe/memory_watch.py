"""Readings at even intervals for a while: the one loop behind every watch, of memory or else."""

import threading
import time
from collections.abc import Callable
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
    """Read now and then every `interval_s`, until `duration_s` have passed.

    Readings keep to the interval's grid: a slow one delays none of the others, it only leaves out
    those whose time it took. Ctrl-C, and `stop` set by another thread, end the watch early; what
    was read by then is returned.

    Args:
        read: Takes one reading.
        interval_s: Seconds between the beginnings of two readings.
        duration_s: Seconds from the first reading to the last; 0 takes one.
        on_reading: Called with each reading as it is taken.
        stop: Ends the watch when set.
        clock: What tells the time, in seconds.

    Raises:
        TPUValidationError: The interval is not above 0, or the duration below it.

    Example:
        >>> peak = max(one.allocated_memory for one in watch(read, interval_s=1, duration_s=60))
    """
    if interval_s <= 0 or duration_s < 0:
        raise TPUValidationError(
            f"interval={interval_s:g} s and duration={duration_s:g} s describe no watch; give an "
            "interval above 0 and a duration of at least 0."
        )
    ended = stop or threading.Event()
    readings: list[Reading] = []
    began = clock()
    try:
        while True:
            readings.append(read())
            if on_reading is not None:
                on_reading(readings[-1])
            passed = clock() - began
            next_at = (passed // interval_s + 1) * interval_s
            if next_at > duration_s or ended.wait(next_at - passed):
                return readings
    except KeyboardInterrupt:
        return readings

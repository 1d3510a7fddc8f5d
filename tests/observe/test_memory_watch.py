"""The loop behind every watch: when it reads, and how it ends."""

import threading

import pytest

from tpukit.errors import TPUValidationError
from tpukit.observe.memory_watch import watch


class Clock:
    """Time that passes only while somebody waits or reads."""

    def __init__(self, read_s=0.0):
        self.now, self.read_s, self.waits, self.set_at = 100.0, read_s, [], None

    def __call__(self):
        return self.now

    def wait(self, seconds):
        self.waits.append(seconds)
        self.now += seconds
        return self.set_at is not None and self.now >= self.set_at

    def read(self):
        began = self.now
        self.now += self.read_s
        return began - 100.0


def run(clock, interval_s, duration_s, **more):
    return watch(
        clock.read, interval_s=interval_s, duration_s=duration_s, stop=clock, clock=clock, **more
    )


@pytest.mark.parametrize(
    ("read_s", "interval_s", "duration_s", "expected"),
    [
        (0.0, 1.0, 3.0, [0, 1, 2, 3]),
        (0.25, 1.0, 3.0, [0, 1, 2, 3]),  # no drift
        (0.0, 1.0, 0.0, [0]),
        (0.0, 2.0, 3.0, [0, 2]),
        (1.5, 1.0, 6.0, [0, 2, 4, 6]),  # a slow reading leaves out those whose time it took
    ],
)
def test_readings_keep_to_the_grid(read_s, interval_s, duration_s, expected):
    assert run(Clock(read_s), interval_s, duration_s) == expected


def test_it_can_be_stopped_and_every_reading_is_told():
    clock, told = Clock(), []
    clock.set_at = 102.0
    assert run(clock, 1.0, 60.0, on_reading=told.append) == [0, 1] == told


def test_a_thread_stops_it():
    stop, first = threading.Event(), threading.Event()
    found = []

    def take():
        found.append(watch(first.set, interval_s=60.0, duration_s=600.0, stop=stop))

    watcher = threading.Thread(target=take)
    watcher.start()
    first.wait()
    stop.set()
    watcher.join()
    assert found == [[None]]


def test_ctrl_c_returns_what_was_read():
    taken = []

    def read():
        if len(taken) == 2:
            raise KeyboardInterrupt
        taken.append(1)
        return len(taken)

    clock = Clock()
    assert watch(read, interval_s=1.0, duration_s=9.0, stop=clock, clock=clock) == [1, 2]


@pytest.mark.parametrize(("interval_s", "duration_s"), [(0.0, 1.0), (-1.0, 1.0), (1.0, -1.0)])
def test_what_describes_no_watch(interval_s, duration_s):
    with pytest.raises(TPUValidationError, match="are not valid"):
        watch(lambda: None, interval_s=interval_s, duration_s=duration_s)

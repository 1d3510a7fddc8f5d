"""A process that hangs, or that is told to stop: `failing_process.py WHAT DIRECTORY`."""

import ctypes
import logging
import sys
import time
from pathlib import Path

from tpukit.training.failure import HangWatchdog, PreemptionGuard


def hang(directory):
    with HangWatchdog(0.5, directory=directory, first_timeout_s=10) as watchdog:
        watchdog.beat()
        time.sleep(60)


def hang_in_c(directory):
    """Sleep with the interpreter locked, as a broken extension would."""
    with HangWatchdog(0.5, directory=directory) as watchdog:
        watchdog.beat()
        ctypes.PyDLL(None).sleep(60)


def never_start(directory):
    with HangWatchdog(60, directory=directory, first_timeout_s=0.5):
        time.sleep(60)


def stop(directory):
    """Step until told to stop, then say after which step."""
    with PreemptionGuard() as guard:
        for step in range(10_000):
            Path(directory, "started").touch()
            time.sleep(0.02)
            if guard.should_stop(step):
                Path(directory, "stopped").write_text(f"{guard.signal_name} {step}")
                return


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    {act.__name__: act for act in (hang, hang_in_c, never_start, stop)}[sys.argv[1]](sys.argv[2])

"""The watchdog ends real processes that hang, with their stacks on disk, and no others."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from tpukit.errors import ConfigError
from tpukit.training.failure import ExitCode, HangWatchdog

PROCESS = Path(__file__).with_name("failing_process.py")


@pytest.mark.parametrize(
    ("what", "code", "frame"),
    [
        ("hang", ExitCode.HUNG, "in hang"),
        ("never_start", ExitCode.HUNG, "in never_start"),
        ("hang_in_c", ExitCode.FAILED, "in hang_in_c"),
    ],
)
def test_a_process_that_hangs_is_ended(tmp_path, what, code, frame):
    done = subprocess.run(
        [sys.executable, str(PROCESS), what, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == code, done.stderr
    (stacks,) = tmp_path.glob("hang-*.txt")
    assert frame in stacks.read_text()
    if code is ExitCode.HUNG:
        assert str(stacks) in done.stderr


def test_a_process_that_goes_on_is_left_alone(tmp_path):
    hangs = []
    with HangWatchdog(0.4, hangs.append, directory=tmp_path) as watchdog:
        for _ in range(12):
            watchdog.beat()
            time.sleep(0.05)
        with watchdog.allow(30):
            time.sleep(0.6)
        watchdog.beat()
    assert hangs == []
    assert list(tmp_path.iterdir()) == []


def test_own_answer_to_a_hang_gets_the_stacks(tmp_path):
    hangs = []
    with HangWatchdog(0.1, hangs.append, directory=tmp_path):
        deadline = time.monotonic() + 10
        while not hangs and time.monotonic() < deadline:
            time.sleep(0.02)
    (stacks,) = hangs
    assert "test_own_answer_to_a_hang_gets_the_stacks" in stacks.read_text()


def test_time_limits_are_checked():
    with pytest.raises(ConfigError, match="timeout_s is 0"):
        HangWatchdog(0)
    with pytest.raises(ConfigError, match="first_timeout_s is -1"):
        HangWatchdog(1, first_timeout_s=-1)


def test_codes_a_supervisor_restarts_on():
    assert [code.name for code in ExitCode if code.is_worth_restarting] == [
        "HUNG",
        "PEER_LOST",
        "STORAGE",
    ]
    # XPK restarts 42 and 127 to 255; 128 + n means a signal to a shell, up to SIGRTMAX (64).
    assert all(192 < code < 256 for code in ExitCode if code.is_worth_restarting)

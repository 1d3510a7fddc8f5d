"""Signals stop training after a whole step, in one process and in several."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from free_ports import free_port

from tpukit.training.failure import PreemptionGuard

PROCESS = Path(__file__).with_name("failing_process.py")
WORKER = Path(__file__).with_name("preempted_worker.py")


def wait_for(path, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} never came"
        time.sleep(0.02)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_stops_after_a_whole_step(tmp_path, number):
    process = subprocess.Popen([sys.executable, str(PROCESS), "stop", str(tmp_path)])
    try:
        wait_for(tmp_path / "started")
        process.send_signal(number)
        assert process.wait(20) == 0
    finally:
        process.kill()
    name, step = (tmp_path / "stopped").read_text().split()
    assert name == number.name
    assert int(step) < 9_999


def test_a_second_interrupt_does_not_wait():
    with PreemptionGuard() as guard:
        os.kill(os.getpid(), signal.SIGINT)
        assert guard.should_stop(0)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_handlers_are_put_back_and_nothing_stops_unasked():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with PreemptionGuard() as guard:
        assert signal.getsignal(signal.SIGTERM) != before[0]
        assert not guard.should_stop(0)
        os.kill(os.getpid(), signal.SIGTERM)
        assert guard.should_stop(1)
        assert guard.should_stop(2), "a stop stays a stop"
        assert guard.signal_name == "SIGTERM"
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_other_threads_say_that_they_catch_nothing(caplog):
    answers = []

    def train():
        with PreemptionGuard() as guard:
            answers.append(guard.should_stop(0))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert answers == [False]
    assert "main thread" in caplog.text


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_a_signal_to_one_process_stops_all_after_the_same_step(tmp_path, number):
    address = f"127.0.0.1:{free_port()}"
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), "2", str(host), address, str(tmp_path)],
            env={**os.environ, "XLA_FLAGS": "", "JAX_NUM_CPU_DEVICES": "1"},
        )
        for host in range(2)
    ]
    try:
        for host in range(2):
            wait_for(tmp_path / f"started-{host}")
        processes[1].send_signal(number)
        assert [process.wait(60) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    stopped = {(tmp_path / f"stopped-{host}").read_text() for host in range(2)}
    assert len(stopped) == 1
    assert int(stopped.pop()) < 9_999

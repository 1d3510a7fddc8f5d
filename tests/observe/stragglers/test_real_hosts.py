"""Real processes that train together, one of them slow at its input."""

import os
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from free_ports import free_port

from tpukit.observe import Run
from tpukit.observe.stragglers.detection import read_host_steps

PROCESS = Path(__file__).with_name("slow_host_process.py")
STEPS, SLOW_S = 60, 0.15


@pytest.mark.parametrize("hosts", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_host_that_waits_for_its_input_is_named(tmp_path, hosts):
    tokens = np.random.default_rng(0).integers(0, 32, 20_000).astype(np.uint16)
    np.save(tmp_path / "tokens.npy", tokens)
    run_dir, address = tmp_path / "run", f"127.0.0.1:{free_port()}"
    slow = hosts - 1
    environment = {
        **os.environ,
        "XLA_FLAGS": os.environ["XLA_FLAGS"].replace("count=8", "count=1"),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    words = [
        [run_dir, tmp_path / "tokens.npy", STEPS, hosts, host, address, slow, SLOW_S]
        for host in range(hosts)
    ]
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROCESS), *map(str, typed)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for typed in words
    ]
    try:
        said = [process.communicate(timeout=240)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * hosts, said
    run = Run(run_dir)
    assert run.processes() == list(range(hosts))
    # As seen from the outside: the steps of all hosts take equally long.
    times = [
        statistics.median(step.step_time_s for step in read_host_steps(run_dir, host, size=1 << 20))
        for host in range(hosts)
    ]
    assert max(times) == pytest.approx(min(times), rel=0.2)
    report = run.stragglers()
    assert [(one.process, one.cause) for one in report.found] == [(slow, "input")], report
    assert report.found[0].share == pytest.approx(SLOW_S / times[0], abs=0.25)
    assert (report.hosts, report.steps) == (hosts, STEPS)

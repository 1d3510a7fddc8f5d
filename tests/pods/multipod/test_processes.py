"""Pods made of processes: the mesh is by process, and a lost pod costs a new start, not the run."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from free_ports import free_port

SCRIPT = Path(__file__).with_name("one_host.py")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("pods-processes")]


def gradient(host, step):
    return np.random.default_rng([host, step]).integers(-8, 8, 32).astype(np.float64)


def start(hosts, pods, steps, folder, *, pause_s=0.0):
    port = free_port()
    processes = []
    for host in range(hosts):
        environment = os.environ | {
            "TPUKIT_NUM_HOSTS": str(hosts),
            "TPUKIT_HOST_ID": str(host),
            "TPUKIT_COORDINATOR": f"127.0.0.1:{port}",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        }
        arguments = [str(pods), str(steps), str(folder), str(pause_s)]
        processes.append(
            subprocess.Popen(
                [sys.executable, str(SCRIPT), *arguments],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        )
    return processes


@pytest.fixture(autouse=True)
def no_process_stays(monkeypatch):
    started = []
    opened = subprocess.Popen

    def remember(*arguments, **keywords):
        started.append(opened(*arguments, **keywords))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", remember)
    yield
    for process in started:
        process.kill()
        process.communicate()


def finish(processes):
    said = [process.communicate(timeout=150)[0].splitlines() for process in processes]
    return [[json.loads(line) for line in lines if line.startswith("{")] for lines in said]


def test_hosts_of_two_pods_step_together_and_one_pod_goes_on_alone(tmp_path):
    processes = start(4, 2, 1000, tmp_path / "common", pause_s=0.05)
    lines = (line for line in processes[0].stdout if line.startswith("{"))
    assert [json.loads(next(lines)) for _ in range(4)][-1] == {"step": 4}
    for process in processes[2:]:  # all hosts of the second pod
        process.send_signal(signal.SIGKILL)
    said = finish(processes)
    for lines in said[:2]:
        assert lines[-1] == {"lost": "peer_lost"}
    reached = max(line["step"] for lines in said[:2] for line in lines if "step" in line)

    final = reached + 5
    alone = finish(start(2, 1, final, tmp_path / "common"))
    ends = [lines[-1] for lines in alone]
    assert ends[0]["mesh"] == {"dcn": 1, "ici": 4}
    assert ends[0]["final"] == ends[1]["final"]
    first = alone[0][0]["step"]
    assert reached - 2 <= first - 1 <= reached  # the last step that was saved whole
    # The truth: four hosts up to there, two hosts from there on.
    truth = np.zeros(32)
    for step in range(final):
        hosts = 4 if step < first - 1 else 2
        truth -= 0.5 * np.mean([gradient(host, step) for host in range(hosts)], axis=0)
    assert np.array_equal(np.asarray(ends[0]["final"]), truth)

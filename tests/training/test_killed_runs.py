"""Real processes, killed for real: what they leave adds up to a run that was never interrupted."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from free_ports import free_port

from tpukit.records import read_metrics
from tpukit.training import ExitCode

WORKER = Path(__file__).with_name("trainer_worker.py")
STEPS = 40
SHAPE = {"batch_size": 8, "sequence_length": 16}

pytestmark = pytest.mark.usefixtures("compile_quickly")


def start(run_dir, tokens, *hosts, steps=STEPS):
    environment = {
        **os.environ,
        # All but the number of devices as here: the losses are compared to the bit.
        "XLA_FLAGS": os.environ["XLA_FLAGS"].replace("count=8", "count=1"),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }
    return subprocess.Popen(
        [sys.executable, str(WORKER), str(run_dir), str(tokens), str(steps), *map(str, hosts)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_step(process, run_dir, step):
    """Until the run has logged `step`, or has ended."""
    deadline = time.monotonic() + 180
    metrics = run_dir / "metrics.jsonl"
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError):
            if metrics.read_text().count("\n") >= step:
                return
        time.sleep(0.005)


@pytest.fixture
def token_file(tmp_path, tokens):
    path = tmp_path / "tokens.npy"
    np.save(path, tokens)
    return path


def test_a_killed_run_ends_as_if_nothing_had_happened(table_trainer, token_file, tmp_path):
    run_dir = tmp_path / "killed"
    pick = random.Random(os.getpid())
    killed_at = []
    for low, high in ((2, 12), (14, 24)):
        process = start(run_dir, token_file)
        wait_for_step(process, run_dir, pick.randint(low, high))
        process.send_signal(signal.SIGKILL)
        _, errors = process.communicate()
        assert process.returncode == -signal.SIGKILL, errors
        killed_at.append(len(read_metrics(run_dir)))
    process = start(run_dir, token_file)
    wait_for_step(process, run_dir, 28)
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    assert output.startswith("preempted"), errors
    stopped_at = int(output.split()[1])
    assert 28 <= stopped_at < STEPS
    process = start(run_dir, token_file)
    whole = table_trainer(run_dir=str(tmp_path / "whole")).train(str(token_file), STEPS, **SHAPE)
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    assert f"resumed from step {stopped_at} " in (run_dir / "train.log").read_text()
    records = read_metrics(run_dir)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1)), killed_at
    assert tuple(record["loss"] for record in records) == whole.losses, killed_at  # to the bit


@pytest.mark.parametrize("hosts", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_train_like_one_device_and_stop_together(
    table_trainer, token_file, tmp_path, hosts
):
    run_dir, address = tmp_path / "hosts", f"127.0.0.1:{free_port()}"
    processes = [start(run_dir, token_file, hosts, host, address) for host in range(hosts)]
    alone = table_trainer(run_dir=str(tmp_path / "alone")).train(str(token_file), STEPS, **SHAPE)
    try:
        wait_for_step(processes[0], run_dir, 6)
        processes[-1].send_signal(signal.SIGTERM)  # one is told, all stop after the same step
        answers = [process.communicate(timeout=180) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * hosts, answers
    records = read_metrics(run_dir)
    lines = [line for output, _ in answers for line in output.splitlines()]
    endings = {line for line in lines if line.startswith("preempted ")}  # logs are beside it
    assert endings == {f"preempted {len(records)} []"}
    losses = [record["loss"] for record in records]
    assert losses == pytest.approx(alone.losses[: len(losses)], abs=1e-5)


MODEL = """
import jax
from tpukit.step.workload import Workload

def build():
    def init(rng):
        return {"table": 0.1 * jax.random.normal(rng, (32, 32))}

    def apply(params, batch):
        return params["table"][batch["inputs"]]

    return Workload((init, apply), batch_size=8, sequence_length=16)
"""


def command(tmp_path, token_file, host, address, steps):
    environment = {
        **os.environ,
        # All but the number of devices as here: the losses are compared to the bit.
        "XLA_FLAGS": os.environ["XLA_FLAGS"].replace("count=8", "count=1"),
        "TPUKIT_NUM_HOSTS": "2",
        "TPUKIT_HOST_ID": str(host),
        "TPUKIT_COORDINATOR": address,
    }
    arguments = [f"{tmp_path / 'table.py'}:build", "--data", str(token_file), "--batch", "8"]
    arguments += ["--sequence", "16", "--steps", str(steps), "--run-dir", str(tmp_path / "run")]
    arguments += ["--checkpoint-every", "5", "--set", "train.schedule=constant"]
    return subprocess.Popen(
        [sys.executable, "-c", "from tpukit.cli.main import run; run()", "train", *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_a_host_that_lost_its_peer_ends_at_once_with_its_own_code(tmp_path, token_file):
    (tmp_path / "table.py").write_text(MODEL)
    address = f"127.0.0.1:{free_port()}"
    hosts = [command(tmp_path, token_file, host, address, 100_000) for host in range(2)]
    try:
        wait_for_step(hosts[0], tmp_path / "run", 12)
        hosts[1].kill()
        hosts[1].communicate()
        _, errors = hosts[0].communicate(timeout=60)
        assert hosts[0].returncode == ExitCode.PEER_LOST, errors
        assert "another process has ended" in errors
        address = f"127.0.0.1:{free_port()}"
        left_at = len(read_metrics(tmp_path / "run"))
        hosts = [command(tmp_path, token_file, host, address, left_at + 5) for host in range(2)]
        answers = [host.communicate(timeout=180) for host in hosts]
        assert [host.returncode for host in hosts] == [0, 0], answers
    finally:
        for host in hosts:
            host.kill()
    assert "resumed from step" in (tmp_path / "run" / "train.log").read_text()
    records = read_metrics(tmp_path / "run")
    assert [record["step"] for record in records] == list(range(1, left_at + 6))


def test_a_host_with_an_error_does_not_wait_for_the_others(tmp_path, token_file):
    (tmp_path / "table.py").write_text(MODEL)
    address = f"127.0.0.1:{free_port()}"
    data = (token_file, tmp_path / "none.npy")
    hosts = [command(tmp_path, data[host], host, address, 10) for host in range(2)]
    try:
        # Leaving in order would wait 300 s for host 0, which waits for this one.
        _, errors = hosts[1].communicate(timeout=120)
        assert (hosts[1].returncode, "none.npy" in errors) == (2, True), errors
    finally:
        for host in hosts:
            host.kill()
            host.communicate()

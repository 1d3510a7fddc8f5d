"""Two and four real processes over loopback train to the same numbers as one."""

import contextlib
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import jax
import optax
import pytest
from free_ports import free_port

from tpukit.models.presets import get_preset
from tpukit.step.workload import Workload

WORKER = Path(__file__).with_name("training_worker.py")


@contextlib.contextmanager
def started_hosts(num_hosts):
    address = f"127.0.0.1:{free_port()}"
    environment = {**os.environ, "JAX_NUM_CPU_DEVICES": "2"}
    environment["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    hosts = [
        subprocess.Popen(
            [sys.executable, str(WORKER), str(num_hosts), str(host), address],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for host in range(num_hosts)
    ]
    try:
        yield hosts
    finally:
        for host in hosts:
            host.kill()


def answer_of(host):
    output, errors = host.communicate(timeout=300)
    assert host.returncode == 0, errors
    return json.loads(output.splitlines()[-1])


@cache
def alone():
    config = get_preset("tiny", d_model=32, d_ff=64, head_dim=8, vocab_size=64)
    work = Workload(config, batch_size=8, sequence_length=16, optimizer=optax.sgd(0.3))
    state = jax.jit(work.init)(jax.random.key(0))
    step = jax.jit(work.train_step)
    losses = []
    for number in range(5):
        state, metrics = step(state, work.example_batch(number))
        losses.append(float(metrics["loss"]))
    return losses, float(optax.tree.norm(state.params))


@pytest.mark.slow
@pytest.mark.parametrize("num_hosts", [2, 4])
def test_hosts_train_together(num_hosts):
    with started_hosts(num_hosts) as hosts:
        losses, norm = alone()  # while they compile
        for answer in map(answer_of, hosts):
            assert answer["losses"] == pytest.approx(losses, abs=1e-5)
            assert answer["norm"] == pytest.approx(norm, rel=1e-6)
            assert answer["held"] == pytest.approx(1 / num_hosts), "each holds only its part"

"""Meshes over real processes: a process is a slice, and the numbers are those of one process."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from free_ports import free_port

WORKER = Path(__file__).with_name("mesh_worker.py")


def run_processes(count):
    environment = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    port = str(free_port())
    processes = [
        subprocess.Popen(
            [sys.executable, str(WORKER), port, str(count), str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(count)
    ]
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, stderr) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, stderr[-2000:]
    return [json.loads(stdout.splitlines()[-1]) for stdout, _ in outputs]


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_compute_what_one_process_computes(count):
    spec = importlib.util.spec_from_file_location("mesh_worker", WORKER)
    worker = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(worker)
    expected, gradient = jax.jit(jax.value_and_grad(worker.loss))(worker.params(), worker.batch())
    checksums = [float(np.abs(np.asarray(leaf)).sum()) for leaf in jax.tree.leaves(gradient)]
    for reply in run_processes(count):
        assert reply["owners"] == [[process, process] for process in range(count)]
        assert reply["loss"] == pytest.approx(float(expected), rel=1e-5)
        assert reply["checksums"] == pytest.approx(checksums, rel=1e-5)

"""Real processes on loopback: hosts that meet compute together, hosts that cannot get an error."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from free_ports import free_port

WORKER = Path(__file__).with_name("multihost_worker.py")


def start_host(host, *, num_hosts, address, timeout_s=60, arguments=(), **environment):
    words = (WORKER, num_hosts, host, address, timeout_s, *arguments)
    return subprocess.Popen(
        [sys.executable, *map(str, words)],
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "2", "XLA_FLAGS": "", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(processes):
    """Each host's (exit code, answer, standard error)."""
    results = []
    try:
        for process in processes:
            output, errors = process.communicate(timeout=120)
            lines = output.splitlines()
            results.append((process.returncode, json.loads(lines[-1]) if lines else None, errors))
    finally:
        for process in processes:
            process.kill()
    return results


def run_hosts(host_ids, **settings):
    return finish([start_host(host, **settings) for host in host_ids])


@pytest.mark.parametrize(
    ("num_hosts", "environment"),
    [
        # gRPC takes even a loopback connection through a proxy: without help, jax aborts here.
        pytest.param(2, {"http_proxy": "http://127.0.0.1:9"}, id="two hosts behind a dead proxy"),
        pytest.param(4, {}, id="four hosts"),
    ],
)
def test_hosts_compute_together(num_hosts, environment):
    address = f"localhost:{free_port()}"
    results = run_hosts(range(num_hosts), num_hosts=num_hosts, address=address, **environment)
    squares = [float(i * i) for i in range(2 * num_hosts)]
    for host, (code, answer, errors) in enumerate(results):
        assert code == 0, errors
        assert "error" not in answer, answer
        assert answer["process"] == host
        assert answer["processes"] == num_hosts
        assert answer["devices"] == len(squares)
        assert answer["psum"] == sum(squares)
        assert answer["gathered"] == squares
    assert "127.0.0.1" in results[0][1]["listening"]
    assert not {"0.0.0.0", "::"} & set(results[0][1]["listening"]), "reachable from outside"


def test_missing_host_is_named_on_every_host_that_came():
    job = {"num_hosts": 3, "address": f"127.0.0.1:{free_port()}"}
    first = start_host(1, **job)
    assert "Host 0 is not reachable yet" in first.stderr.readline()
    for code, answer, errors in finish([first, start_host(0, timeout_s=2, **job)]):
        assert code == 0, errors
        assert answer["error"] == "CommunicationTimeout"
        assert "2 of 3 hosts came within 2 s; missing: host 2." in answer["message"]


def test_no_coordinator_at_the_address():
    address = f"127.0.0.1:{free_port()}"
    ((code, answer, errors),) = run_hosts([1], num_hosts=2, address=address, timeout_s=1)
    assert code == 0, errors
    assert answer["error"] == "CommunicationTimeout"
    assert f"No coordinator at {address} within 1 s (connection refused)" in answer["message"]
    assert "Host 0 is not reachable yet" in errors


@pytest.mark.parametrize(
    "shared", [False, True], ids=["plain", "held with SO_REUSEPORT as by gRPC"]
)
def test_port_in_use(shared):
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(shared))
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        ((code, answer, errors),) = run_hosts([0], num_hosts=2, address=f"127.0.0.1:{port}")
    assert code == 0, errors
    assert answer["error"] == "TPUDistributedError"
    assert f"Port {port} on 127.0.0.1 is in use" in answer["message"]


def test_an_error_inside_the_job_reaches_the_user():
    address = f"127.0.0.1:{free_port()}"
    good, bad = run_hosts([0, 1], num_hosts=2, address=address, arguments=["raise"])
    assert bad[0] == 1
    assert "ValueError: the user's own mistake" in bad[2]
    assert good[0] == 0, good[2]

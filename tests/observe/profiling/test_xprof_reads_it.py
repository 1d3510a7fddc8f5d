"""XProf's own server, unmodified, finds the recordings under the names they were given."""

import gzip
import json
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import jax
import pytest
from free_ports import free_port

from tpukit.observe import TPUProfiler

PATIENCE_S = 120


@pytest.fixture
def server(tmp_path):
    """The address of XProf over what a profiler wrote."""
    pytest.importorskip("xprof")
    profiler = TPUProfiler(tmp_path / "profiles")
    step = jax.jit(lambda x: x @ x)
    for name in ("train_step", "evaluate"):
        with profiler.profile(name):
            step(jax.numpy.ones((64, 64)))
    port = free_port()
    program = Path(sys.executable).with_name("xprof")
    process = subprocess.Popen(
        [str(program), "--logdir", str(tmp_path / "profiles"), "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    yield f"http://127.0.0.1:{port}/data/plugin/profile"
    process.kill()
    process.wait()


def ask(address):
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            with urllib.request.urlopen(address, timeout=10) as answer:
                content = answer.read()
            return json.loads(gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content)
        except (urllib.error.URLError, ConnectionError):
            assert time.monotonic() < deadline, "XProf did not start"
            time.sleep(0.2)


def test_both_recordings_are_listed_with_their_tools(server):
    runs = ask(f"{server}/runs")
    assert sorted(run.partition("/")[0] for run in runs) == ["evaluate", "train_step"]
    tools = ask(f"{server}/run_tools?run={runs[0].replace('/', '%2F')}")
    assert {"trace_viewer@", "overview_page", "memory_viewer"} <= set(tools)

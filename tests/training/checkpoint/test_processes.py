"""Several processes save one checkpoint together, and one process reads it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from etils import epath
from free_ports import free_port

from tpukit.errors import TPUCheckpointError
from tpukit.training.checkpoint import TPUCheckpointer
from tpukit.training.checkpoint.record import file_sizes

PROCESS = Path(__file__).with_name("pod_process.py")
HOSTS = 2


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """The folder of a job of two processes that has ended, and what each of them saw."""
    folder = tmp_path_factory.mktemp("pod")
    address = f"127.0.0.1:{free_port()}"
    processes = [
        subprocess.Popen(
            [sys.executable, str(PROCESS), str(HOSTS), str(host), address, str(folder)],
            env={**os.environ, "XLA_FLAGS": "", "JAX_NUM_CPU_DEVICES": "2"},
        )
        for host in range(HOSTS)
    ]
    try:
        assert [process.wait(120) for process in processes] == [0] * HOSTS
    finally:
        for process in processes:
            process.kill()
    return folder, [json.loads((folder / f"seen-{host}.json").read_text()) for host in range(HOSTS)]


def test_all_processes_save_and_restore_their_part(job):
    _, seen = job
    for host, saw in enumerate(seen):
        assert saw["steps"] == [2, 3]
        assert saw["restored"] == [3, 3, {"host": host, "index": 30 + host}]
        assert saw["same"]


def test_a_refusal_reaches_every_process(job):
    _, seen = job
    assert "another run" in seen[0]["refusal"]
    assert "Process 0 refused to save step 4" in seen[1]["refusal"]


def test_damage_one_process_finds_makes_all_go_back(job):
    _, seen = job
    assert [saw["fell_back"] for saw in seen] == [[2, [3]]] * HOSTS


def test_one_process_reads_what_two_have_written(job):
    folder, _ = job
    with TPUCheckpointer(folder / "checkpoints") as checkpointer:
        restored = checkpointer.restore()
        assert restored.step == 2
        expected = np.arange(64, dtype=np.float32).reshape(16, 4) + 2
        np.testing.assert_array_equal(restored.params["w"], expected)
        assert restored.positions == ({"host": 0, "index": 20}, {"host": 1, "index": 21})
        with pytest.raises(TPUCheckpointError, match=r"saved by 2 processes"):
            _ = restored.data
        records = sorted(path.name for path in (folder / "checkpoints" / "2" / "tpukit").iterdir())
        assert records == [f"process-0000{host}-of-00002.json" for host in range(HOSTS)]


def test_a_file_that_another_process_renames_meanwhile_is_none(tmp_path):
    (tmp_path / "a").write_bytes(b"123")
    (tmp_path / "b.part").symlink_to("gone")  # listed, and not there when it is looked at
    assert file_sizes(epath.Path(tmp_path)) == {"a": 3}

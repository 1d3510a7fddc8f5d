"""A disk that is full, or cannot be written for a while, costs saves and never the run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from free_ports import free_port
from small_disk import may_mount, on_small_disk

from tpukit.exit_codes import ExitCode
from tpukit.records.events import Event, good_saves

WORKER = Path(__file__).with_name("trainer_worker.py")
STEPS = 12

pytestmark = pytest.mark.skipif(not may_mount(), reason="this user may not mount a file system")


@pytest.fixture
def token_file(tmp_path, tokens):
    path = tmp_path / "tokens.npy"
    np.save(path, tokens)
    return path


def train(tmp_path, token_file, how, *hosts, patience_s=600):
    """Train on a small disk whose storage fails as said; the finished process."""
    disk = tmp_path / "disk"
    disk.mkdir(exist_ok=True)
    command = [sys.executable, WORKER, disk / "run", token_file, STEPS]
    environment = {
        **os.environ,
        "XLA_FLAGS": os.environ["XLA_FLAGS"].replace("count=8", "count=1"),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "STORAGE_FAILS": how,
        "PATIENCE_S": str(patience_s),
    }
    commands = [[*command, *host] for host in hosts] or [command]
    return subprocess.run(
        on_small_disk(disk, *commands, size_mb=1),
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def losses(output):
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return {line["step"]: line["loss"] for line in lines}


def test_training_goes_on_and_the_next_save_is_tried(tmp_path, token_file, table_trainer):
    whole = table_trainer(run_dir=str(tmp_path / "whole"))
    expected = whole.train(str(token_file), STEPS, batch_size=8, sequence_length=16)
    done = train(tmp_path, token_file, "full:4:8")
    assert done.returncode == 0, done.stderr
    assert "done 12 [6]" in done.stdout, "the save of step 6 failed, and that of 9 did not"
    assert "kept [3, 9, 12]" in done.stdout
    assert losses(done.stdout) == dict(enumerate(expected.losses, 1)), "lines waited for room"
    assert "Traceback" not in done.stderr
    assert "No space left on device. Step 3 is still good" in done.stdout


def test_two_processes_learn_of_it_together(tmp_path, token_file):
    address = f"127.0.0.1:{free_port()}"
    hosts = [(2, 1, address), (2, 0, address)]
    done = train(tmp_path, token_file, "readonly:4:8", *hosts)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done 12 [6]") == 2
    assert "kept [3, 9, 12]" in done.stdout
    assert "Read-only file system. Step 3 is still good" in done.stdout


def test_storage_that_stays_away_ends_the_run_and_names_the_good_step(tmp_path, token_file):
    done = train(tmp_path, token_file, "full:4:99", patience_s=1)
    assert done.returncode == ExitCode.STORAGE, done.stderr
    (line,) = done.stderr.strip().splitlines()
    assert "No space left on device. Step 3 is still good" in line
    assert "start it again to go on from that step" in line


def test_only_saves_that_did_not_fail_count():
    events = [
        Event(1.0, "saved", {"step": 3}),
        Event(2.0, "saved", {"step": 6}),
        Event(3.0, "save failed", {"failed_step": 6, "good_step": 3}),
    ]
    assert [event.number("step") for event in good_saves(events)] == [3]

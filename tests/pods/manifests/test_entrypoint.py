"""The program a container starts with, as a real process."""

import json
import os
import signal
import subprocess
import sys
import tarfile
import time

import pytest

from tpukit.pods.manifests.jobset import PROGRAM
from tpukit.runtime.multihost import DEFAULT_PORT

RANK = {
    "TPUKIT_HOSTS_PER_SLICE": "4",
    "TPUKIT_COORDINATOR_HOST": "gem-slice-0-0.gem",
    "TPUKIT_SLICE_ID": "1",
    "JOB_COMPLETION_INDEX": "2",
    "TPUKIT_ATTEMPT": "3",
}


def start(*argv, **variables):
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *argv],
        env={"PATH": os.environ["PATH"]} | RANK | variables,
        stdout=subprocess.PIPE,
        text=True,
    )


def test_it_says_which_process_this_is():
    show = "import os, json; print(json.dumps(dict(os.environ)))"
    said = json.loads(start(sys.executable, "-c", show).communicate()[0])
    assert said["TPUKIT_HOST_ID"] == "6"
    assert said["TPUKIT_COORDINATOR"] == f"gem-slice-0-0.gem:{DEFAULT_PORT + 3}"


def test_it_unpacks_files_and_runs_the_setup(tmp_path):
    (tmp_path / "say.py").write_text("print(open('made').read())")
    archive, parts = tmp_path / "bundle.tar.gz", tmp_path / "parts"
    with tarfile.open(archive, "w:gz") as packed:
        packed.add(tmp_path / "say.py", "say.py")
    parts.mkdir()
    whole = archive.read_bytes()
    for number in range(3):
        (parts / f"part-00{number}").write_bytes(whole[number * 50 : (number + 1) * 50])
    (parts / "part-003").write_bytes(whole[150:])
    (parts / "..data").mkdir()  # as Kubernetes mounts them
    setup = json.dumps([[sys.executable, "-c", "open('made', 'w').write('ready')"]])
    own = {"TPUKIT_BUNDLE": str(parts), "TPUKIT_SETUP": setup, "TMPDIR": str(tmp_path)}
    process = start(sys.executable, "say.py", **own)
    assert process.communicate()[0] == "ready\n"
    assert process.returncode == 0


@pytest.mark.parametrize(
    ("code", "status"),
    [
        ("raise SystemExit(201)", 201),
        ("import os; os.abort()", 134),
        ("import os; os.kill(os.getpid(), 9)", 137),
    ],
)
def test_the_status_is_that_of_the_command(code, status):
    process = start(sys.executable, "-c", code)
    process.communicate()
    assert process.returncode == status


@pytest.mark.parametrize(("saved", "status"), [(0, 143), (1, 1)])
def test_a_command_that_was_told_to_stop_has_not_finished(saved, status):
    program = f"""
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit({saved}))
print("up", flush=True)
time.sleep(60)
"""
    process = start(sys.executable, "-c", program)
    assert process.stdout.readline() == "up\n"
    time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10)
    assert process.returncode == status

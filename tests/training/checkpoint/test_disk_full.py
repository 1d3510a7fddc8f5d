"""On a disk that is really full, a save fails with a reason and the last good one stays."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from small_disk import may_mount, on_small_disk

PROCESS = Path(__file__).with_name("filling_process.py")


def run(command, **settings):
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, **settings
    )


@pytest.mark.skipif(not may_mount(), reason="this user may not mount a small file system")
def test_a_full_file_system(tmp_path):
    """The save needs 16 MB."""
    command = [sys.executable, str(PROCESS), str(tmp_path), "space"]
    done = run(on_small_disk(tmp_path, command, size_mb=8))
    assert done.returncode == 0, done.stderr
    assert ": No space left on device. Step 1 is still good; free space" in done.stdout
    assert "Traceback" not in done.stderr


def test_a_limit_on_file_sizes(tmp_path):
    done = run([sys.executable, str(PROCESS), str(tmp_path), "limit"], env={**os.environ})
    assert done.returncode == 0, done.stderr
    assert "File too large" in done.stdout
    assert "Step 1 is still good" in done.stdout

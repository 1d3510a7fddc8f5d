"""A run killed in the middle of a save, again and again, always has a good checkpoint to go on."""

import random
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tpukit.training.checkpoint import TPUCheckpointer

PROCESS = Path(__file__).with_name("saving_process.py")


def kill_at_random(folder, seed):
    """Start the run, let it complete a step, kill it at a random moment; the last step it saw."""
    process = subprocess.Popen(
        [sys.executable, str(PROCESS), str(folder), "256"], stdout=subprocess.PIPE, text=True
    )
    try:
        first = int(process.stdout.readline())
        time.sleep(random.Random(seed).uniform(0.0, 0.5))
        process.kill()
        seen = [int(line) for line in process.stdout if line.endswith("\n")]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    return seen[-1] if seen else first


@pytest.mark.parametrize("kills", [5, pytest.param(25, marks=pytest.mark.slow)])
def test_a_good_checkpoint_remains_after_every_kill(tmp_path, kills):
    last = 0
    left_behind = 0
    for seed in range(kills):
        completed = kill_at_random(tmp_path, seed)
        assert completed > last, "the run did not go on from where it was"
        names = [path.name for path in tmp_path.iterdir()]
        with TPUCheckpointer(tmp_path) as checkpointer:
            restored = checkpointer.restore()
        # Arrays that are being written, or written and not recorded: either is half a save.
        half = [name for name in names if name.isdigit() and int(name) > restored.step]
        left_behind += any("tmp" in name for name in names) or bool(half)
        assert completed <= restored.step <= completed + 1
        assert restored.data == {"step": restored.step}
        for array in restored.params.values():
            np.testing.assert_array_equal(array, np.full(256 * 64, restored.step, np.float32))
        last = restored.step
    assert left_behind, "no kill came in the middle of a save: this test has shown nothing"


def test_a_program_that_ends_without_closing_loses_nothing(tmp_path):
    code = f"""
import jax.numpy as jnp
from tpukit.training.checkpoint import TPUCheckpointer
checkpointer = TPUCheckpointer({str(tmp_path)!r})
checkpointer.save(1, params={{f"w{{i}}": jnp.full(1 << 20, i) for i in range(8)}})
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "Traceback" not in done.stderr
    with TPUCheckpointer(tmp_path) as checkpointer:
        assert checkpointer.restore().params["w7"].tolist()[-1] == 7

"""Examples run as a person starts them, and end with what they promise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name, *arguments):
    done = subprocess.run(
        [sys.executable, EXAMPLES / name, *map(str, arguments)],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": os.environ["MPLCONFIGDIR"]},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def figure(output, name):
    """The number after `name` in a line of output."""
    line = next(line for line in output.splitlines() if line.startswith(name))
    return float(line.removeprefix(name).split()[0].rstrip(","))


@pytest.mark.slow
def test_text_is_learnt_plotted_and_written(tmp_path):
    output = run("train_text.py", "--steps", 60, "--out", tmp_path)
    unigram = figure(output, "entropy of single bytes")
    assert 3 < unigram < 3.5
    assert figure(output, "loss on held-out text") < 0.9 * unigram
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "loss.html").read_text()
    assert len(output[output.index("sample:") :]) > 150


@pytest.mark.slow
def test_experts_learn_and_share_the_work(tmp_path):
    output = run("train_moe.py", "--steps", 40, "--out", tmp_path)
    assert figure(output, "loss") < figure(output, "entropy of single bytes")
    assert 1 <= figure(output, "busiest expert") < 3


@pytest.mark.slow
def test_an_equinox_model_trains_and_resumes(tmp_path):
    output = run("train_equinox.py", "--steps", 40, "--out", tmp_path)
    assert "resumed from 20" in output
    losses = [float(line.split("loss ")[1]) for line in output.splitlines()]
    assert losses[1] < losses[0] < 5


@pytest.mark.slow
def test_a_torch_model_trains_is_optimised_saved_and_loaded(tmp_path):
    output = run("torch_integration.py", "--steps", 30, "--out", tmp_path)
    assert figure(output, "fused step      step 30, loss") < 4.5
    for level in ("conservative", "balanced", "aggressive"):
        assert figure(output, f"{level:<15} differs by") < 0.05
    assert "the same outputs" in output
    assert "tpukit check --torch" in output


def test_a_loop_of_ones_own_is_watched():
    output = run("monitor_loop.py")
    assert "scrape it at http://127.0.0.1:" in output
    assert figure(output, "step 20: loss") < 1
    assert figure(output, "TFLOP/s") > 0
    (alert,) = [line for line in output.splitlines() if line.startswith("alert: step time on")]
    assert "above 0.03 s" in alert
    assert "Likely cause:" in alert


def test_a_plan_is_a_job_for_any_slice():
    output = run("choose_slice.py")
    assert output.startswith("v6e-")
    assert "model: llama3.1-8b" in output
    assert output.endswith("{'fsdp': 32}\n")


@pytest.mark.slow
@pytest.mark.libtpu
@pytest.mark.xdist_group("libtpu")
def test_what_does_not_fit_is_mended_by_the_first_proposal():
    lines = run("check_and_fix.py").splitlines()
    assert "too much" in lines[0]
    assert "free" in lines[-1]


@pytest.mark.slow
def test_a_mesh_changes_nothing():
    words = run("own_model.py").split()
    assert float(words[-1]) == pytest.approx(float(words[-4].rstrip(",")), rel=1e-4)


@pytest.mark.slow
def test_weights_come_back_to_the_bit():
    assert "read back equal" in run("huggingface_round_trip.py")


def test_there_are_ten_and_each_is_tried_here():
    source = Path(__file__).read_text()
    for path in EXAMPLES.glob("*.py"):
        # What the demo runs is tried by it; a layer is what `tpukit compile` is shown with.
        assert path.name in source or path.name in ("demo.py", "layer.py")
        assert len(path.read_text().splitlines()) <= 120

"""A user's builder runs once per command, and a job's model is kept where it does not change."""

import numpy as np
import pytest
from typer.testing import CliRunner

from tpukit.cli.app import app
from tpukit.job import Job
from tpukit.job.step import build_step
from tpukit.planner.planning import plan
from tpukit.planner.search.verification import OwnModelSearch

BUILDER = """
import jax, jax.numpy as jnp
from pathlib import Path
from tpukit import Workload

def init(rng):
    return {"w": jax.random.normal(rng, (256, 256))}

def apply(params, batch):
    return batch["inputs"] @ params["w"]

def loss(outputs, batch):
    return jnp.mean((outputs - batch["targets"]) ** 2)

def build():
    with Path("log").open("a") as log:
        log.write("built\\n")
    rows = jax.ShapeDtypeStruct((64, 256), jnp.float32)
    return Workload((init, apply), batch={"inputs": rows, "targets": rows}, loss=loss)
"""
TORCH = """
import torch
from pathlib import Path

def build():
    with Path("log").open("a") as log:
        log.write("built\\n")
    return torch.nn.Linear(16, 4), {"input": torch.zeros(8, 16), "targets": torch.zeros(8, 4)}
"""
NAME = "regression.py:build"


@pytest.fixture
def times_built(tmp_path, monkeypatch):
    """Return how often the builder has run."""
    (tmp_path / "regression.py").write_text(BUILDER)
    (tmp_path / "linear.py").write_text(TORCH)
    rows = np.zeros((64, 256), np.float32)
    np.savez(tmp_path / "rows.npz", inputs=rows, targets=rows)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TPUKIT_CACHE_DIR", str(tmp_path / "cache"))
    log = tmp_path / "log"
    return lambda: len(log.read_text().splitlines()) if log.exists() else 0


def run(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == 0, (result.output, result.exception)


def test_a_job_and_those_made_from_it_load_their_model_once(times_built):
    job = Job(model=NAME, on="v6e-8")
    assert (job.examples, job.reads_tokens, job.model_flops) == (64, False, None)
    assert build_step(job).work.examples == 64
    changed = job.replace({"train.optimizer": "lion", "on": "v6e-4"})
    assert build_step(changed, values=False).work.examples == changed.examples == 64
    assert times_built() == 1
    job.replace(model="regression.py:init")
    assert times_built() == 1


def test_another_model_is_loaded_anew():
    job = Job(model="tiny", on="v6e-8")
    assert job.replace(batch_size=16).load_model() is job.load_model()
    deeper = job.replace(model={"preset": "tiny", "n_layers": 5})
    assert (job.load_model().n_layers, deeper.load_model().n_layers) == (2, 5)


def test_a_torch_model_is_built_again_only_for_its_values(times_built):
    pytest.importorskip("torchax")
    job = Job(model="torch:linear.py:build", on="v6e-8")
    assert job.examples == 8
    build_step(job, values=False)
    assert times_built() == 1
    build_step(job)
    build_step(job, values=False)
    assert times_built() == 2


@pytest.mark.parametrize("on", [(), ("--on", "v6e-8")])
def test_training_builds_once(times_built, on):
    run("train", NAME, *on, "--data", "rows.npz", "--steps", 2, "--dry-run")
    assert times_built() == 1


def test_a_plan_builds_once(times_built, monkeypatch):
    jobs = []

    def choices(self):
        for job in self._jobs():
            build_step(job, values=False)
            jobs.append(job)
        return [], "nothing was compiled"

    monkeypatch.setattr(OwnModelSearch, "choices", choices)
    plan(NAME, tokens=1e6, on="v6e", max_chips=32)
    assert len({job.on for job in jobs}) > 3
    assert times_built() == 1


@pytest.mark.libtpu
@pytest.mark.xdist_group("libtpu")
@pytest.mark.parametrize(
    "command",
    [
        ("check", NAME, "--on", "v6e-4", "--fix"),
        ("plan", NAME, "--tokens", "1e6", "--on", "v6e-1,v6e-4"),
    ],
    ids=lambda command: command[0],
)
def test_a_command_that_compiles_builds_once(times_built, command):
    run(*command)
    assert times_built() == 1

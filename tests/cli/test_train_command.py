"""`tpukit train` as a person types it: a job file, a preset, overrides, one-line mistakes."""

import json

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from tpukit.cli.train import train
from tpukit.errors import ConfigError, TPUModelError, TPUValidationError
from tpukit.job import read_job
from tpukit.observe.sources.replay import read_readings

MODEL = """
import jax
from tpukit.step.workload import Workload

def build():
    def init(rng):
        return {"table": 0.1 * jax.random.normal(rng, (32, 32))}

    def apply(params, batch):
        return params["table"][batch["inputs"]]

    return Workload((init, apply), batch_size=8, sequence_length=16)
"""


@pytest.fixture
def job(tmp_path):
    (tmp_path / "table.py").write_text(MODEL)
    np.save(tmp_path / "tokens.npy", np.arange(4000, dtype=np.uint16) % 32)
    path = tmp_path / "job.yaml"
    path.write_text(
        f"model: {tmp_path / 'table.py'}:build\nbatch_size: 8\nsequence_length: 16\n"
        f"train:\n  data: {tmp_path / 'tokens.npy'}\n  steps: 3\n  learning_rate: 0.1\n"
        f"  run_dir: {tmp_path / 'run'}\n"
    )
    return path


@pytest.fixture
def run():
    app = typer.Typer()
    app.command()(train)

    def invoke(*arguments):
        return CliRunner().invoke(app, [str(argument) for argument in arguments])

    return invoke


def test_trains_resumes_and_prints(run, job, tmp_path):
    result = run(job, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout[result.stdout.index("{") :])
    assert (found["steps"], found["stopped"]) == (3, "done")
    assert found["losses"][-1] < found["losses"][0]
    again = run(job, "--steps", 5)
    assert again.exit_code == 0, again.output
    assert "training done: 5 steps" in again.output
    assert "resumed from step 3" in again.output
    slower = run(
        job, "--steps", 6, "--set", "train.learning_rate=1e-4", "--set", "train.clip_norm=null"
    )
    assert slower.exit_code == 0, slower.output
    assert "learning_rate was" in slower.output
    assert "clip_norm was 1.0, is None" in slower.output
    other = run(job, "--set", "train.seed=7")
    assert isinstance(other.exception, TPUValidationError)
    assert "another run: seed was 0, is 7" in str(other.exception)


def test_readings_of_the_host_are_kept_beside_the_run(run, job, tmp_path):
    assert run(job, "--set", "observe.monitoring_interval_seconds=0.5").exit_code == 0
    kept = read_readings(tmp_path / "run" / "hosts" / "0" / "readings.jsonl")
    assert {"jax", "psutil", "trainer", "profile"} <= {reading.source for reading in kept}
    assert [one for one in kept if one.values("host_memory_total")]
    quiet = tmp_path / "quiet"
    done = run(job, "--run-dir", quiet, "--set", "observe.enable_monitoring=false")
    assert done.exit_code == 0
    assert not (quiet / "hosts" / "0" / "readings.jsonl").exists()


def test_diverging_has_an_exit_code_of_its_own(run, job, tmp_path):
    result = run(
        *(job, "--run-dir", tmp_path / "bad", "--optimizer", "sgd"),
        *("--set", "train.learning_rate=1e6", "--set", "train.weight_decay=1", "--steps", 20),
    )
    assert result.exit_code == 3, result.output
    assert "diverged: step" in result.output


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (["tinny"], TPUValidationError, "Did you mean 'tiny'"),
        (["tiny", "--set", "train.lerning_rate=1"], ConfigError, "'train.learning_rate'"),
        (["tiny", "--set", "train.schedule=cosin"], ConfigError, "'constant', 'cosine'"),
        (["missing.yaml"], ConfigError, "missing.yaml cannot be read"),
        (["tiny", "--steps", "2"], ConfigError, "no data to train on"),
        (["tiny", "--data", "nowhere.npy", "--steps", "2"], TPUValidationError, "nowhere.npy"),
        (
            ["tiny", "--sequence", "4096", "--steps", "2", "--data", "nowhere.npy"],
            TPUModelError,
            "max_seq_len=128",
        ),
        (["tiny", "--mesh", "fsdp"], TPUValidationError, "write fsdp=8,tensor=4"),
    ],
)
def test_mistakes_are_one_line(run, monkeypatch, tmp_path, arguments, error, message):
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert isinstance(result.exception, error), result.output
    assert message in str(result.exception)
    assert not list(tmp_path.iterdir())


def test_a_preset_gets_a_length_it_can_take():
    assert read_job("tiny").tokens_per_example == 128
    assert read_job("llama3.1-8b").tokens_per_example == 2048

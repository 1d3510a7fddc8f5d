"""Models that read no tokens are trained, launched and rehearsed from the command line."""

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from tpukit.cli.app import app
from tpukit.errors import ConfigError, TPUError
from tpukit.job import Job
from tpukit.job.reading import read_job
from tpukit.pods.launching.bundle import make_bundle
from tpukit.rehearsal.stand_in import make_stand_in

pytestmark = pytest.mark.usefixtures("compile_quickly")
CODE = """
import jax, numpy as np
from flax import nnx
from tpukit import Workload

class Net(nnx.Module):
    def __init__(self, rngs):
        self.out = nnx.Linear(3, 2, rngs=rngs)
    def __call__(self, x):
        return self.out(x.mean(axis=(1, 2)))

def build():
    image = jax.ShapeDtypeStruct((8, 4, 4, 3), "float32")
    return Workload(Net, batch={"inputs": image, "targets": jax.ShapeDtypeStruct((8,), "int32")})

def bare(): return Net(nnx.Rngs(0))

def batches(batch_size=16):
    labels = np.arange(batch_size, dtype=np.int32) % 2
    while True:
        yield np.ones((batch_size, 4, 4, 3), np.float32) * labels[:, None, None, None], labels
"""


@pytest.fixture
def run():
    return lambda *words: CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    from PIL import Image

    (tmp_path / "net.py").write_text(CODE)
    labels = np.arange(64, dtype=np.int32) % 2
    pixels = np.ones((64, 4, 4, 3), np.float32) * labels[:, None, None, None]
    np.savez(tmp_path / "data.npz", inputs=pixels, targets=labels)
    for name, shade in (("black", 0), ("white", 255)):
        (tmp_path / "images" / name).mkdir(parents=True)
        for one in range(16):
            pixel = np.full((5, 5, 3), shade, np.uint8)
            Image.fromarray(pixel).save(tmp_path / "images" / name / f"{one}.png")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("model", ["build", "bare"])
@pytest.mark.parametrize("data", ["net.py:batches", "data.npz", "images"])
def test_train_learns_from_them(run, folder, model, data):
    typed = ("--learning-rate", 0.1, "--run-dir", "run", "--json")
    size = ("--batch-size", 16) if model == "bare" else ()
    result = run("train", f"net.py:{model}", "--data", data, "--steps", 20, *typed, *size)
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert told["losses"][-1] < told["losses"][0] / 2
    assert told["tokens_per_s_per_chip"]["value"] is None
    assert told["examples_per_s_per_chip"]["value"] > 0
    again = run("train", f"net.py:{model}", "--data", data, "--steps", 22, *typed, *size)
    assert json.loads(again.stdout)["resumed_from"] == 20


def test_wrong_data_are_one_sentence(run, folder):
    for data, message in (
        ("net.py:batch", "Did you mean 'batches'"),
        ("date.npz", "Did you mean 'data.npz'"),
    ):
        result = run("train", "net.py:build", "--data", data, "--steps", 2, "--run-dir", "run")
        assert isinstance(result.exception, TPUError)
        assert message in str(result.exception)


def test_a_launch_ships_the_function(folder):
    job = read_job("net.py:build", {"on": "v6e-1", "train.data": "net.py:batches"})
    assert set(make_bundle(job).files) == {"job.yaml", "net.py"}
    (folder / "feed.py").write_text("def batches(): ...")
    job = job.replace({"train.data": "feed:batches", "train.eval_data": "data.npz"})
    assert set(make_bundle(job).files) == {"job.yaml", "net.py", "feed.py", "data.npz"}


def test_launch_and_rehearse_take_data(run, folder):
    result = run(
        *("launch", "net.py:build", "--on", "v6e-1", "--provider", "local", "--dry-run"),
        *("--data", "net.py:batches", "--steps", 3),
    )
    assert result.exit_code == 0, result.output
    assert "net.py" in result.stdout
    refused = run("rehearse", "net.py:build", "--on", "v6e-1", "--dry-run", "-o", "out")
    assert "reads no tokens" in str(refused.exception)
    for data in ("net.py:batches", "data.npz", "images"):
        told = run("rehearse", "net.py:build", "--on", "v6e-1", "--dry-run", "--data", data)
        assert told.exit_code == 0, told.output
        assert data in told.stdout


def test_a_job_knows_whether_it_reads_tokens(folder):
    assert not Job(model="net.py:build").reads_tokens
    assert Job(model="tiny").reads_tokens
    with pytest.raises(ConfigError, match="reads no tokens"):
        make_stand_in(Job(model="net.py:build", on="v6e-1"), steps=30, folder=folder)

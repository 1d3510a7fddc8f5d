"""What `tpukit train` refuses, `tpukit launch` refuses before it asks anybody for a pod."""

import json

import fake_train
import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from tpukit import TPUTrainer
from tpukit.cli.app import app
from tpukit.errors import ConfigError, TPUError
from tpukit.job.job import Job
from tpukit.job.reading import read_job
from tpukit.pods import Store
from tpukit.pods.launching.bundle import make_bundle
from tpukit.pods.launching.launch import _notes, _with_paths, prepare_launch
from tpukit.pods.launching.trial import refuse_untrainable

GOOD = {
    "model": "tiny",
    "on": "2xv6e-1",
    "batch_size": 8,
    "sequence_length": 16,
    "train": {"data": "tokens.npy", "steps": 2, "run_dir": "run"},
}
WRONG = {
    "no data": ({"train": {"data": None}}, "no data to train on"),
    "data are not there": ({"train": {"data": "nowhere.npy"}}, "nowhere.npy"),
    "no steps": ({"train": {"steps": None}}, "how many steps"),
    "too few data": ({"sequence_length": 100000}, "100000"),
    "no such hook": ({"train": {"hooks": ["wandbb"]}}, "wandb"),
    "evaluation data": ({"train": {"eval_data": "gone.npy"}}, "gone.npy"),
    "a folder of something else": ({"train": {"run_dir": "full"}}, "contains files but no run"),
    "a model that fails": ({"model": "mine.py:broken", "train": {}}, "not today"),
}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TPUKIT_STATE_DIR", str(tmp_path / "state"))
    np.save("tokens.npy", np.arange(2000, dtype=np.uint16) % 256)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").touch()
    (tmp_path / "mine.py").write_text("def broken():\n    raise RuntimeError('not today')\n")
    return tmp_path


def write(folder, changes):
    job = {**GOOD, **changes, "train": {**GOOD["train"], **changes.get("train", {})}}
    job["train"] = {key: value for key, value in job["train"].items() if value is not None}
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    return "job.yaml"


@pytest.mark.parametrize("what", WRONG)
def test_a_check_refuses_what_training_refuses(here, what):
    changes, said = WRONG[what]
    job = read_job(write(here, {**changes, "on": None}))
    before = sorted(path.name for path in here.rglob("*"))
    refusals = []
    for call in (TPUTrainer.check, TPUTrainer.train):
        with pytest.raises((TPUError, RuntimeError), match=said) as refused:
            call(TPUTrainer.from_job(job, progress=False))
        refusals.append(str(refused.value))
    assert refusals[0] == refusals[1]
    assert sorted(path.name for path in here.rglob("*")) == before


@pytest.mark.parametrize(
    ("address", "said"),
    [("file:///run", "a path without file://"), ("gs:/bucket/run", "expected two slashes")],
)
def test_an_address_that_cannot_be_a_run_directory_is_refused_at_once(here, address, said):
    write(here, {"train": {"run_dir": address}})
    for words in (["train", "job.yaml"], ["launch", "job.yaml", "--dry-run"]):
        found = CliRunner().invoke(app, words)
        assert isinstance(found.exception, ConfigError), found.output
        assert said in str(found.exception)
    with pytest.raises(ConfigError, match="expected a local path or a gs:// address"):
        read_job(write(here, {"train": {"checkpoint_dir": "s3://bucket/run"}}))


def test_a_launch_on_this_machine_keeps_an_address(here):
    job = read_job(write(here, {"train": {"run_dir": "gs://bucket/run"}}))
    launched = _with_paths(job, "run", is_local=True)
    assert launched.train.run_dir == "gs://bucket/run"
    assert not _notes(launched, "gcp"), "its checkpoints are in the bucket, too"


def test_a_check_says_what_would_be_trained_and_writes_nothing(here):
    job = read_job(write(here, {"on": None}))
    assert "2 steps of 8 x 16 tokens" in TPUTrainer.from_job(job, progress=False).check()
    assert not (here / "run").exists()


def test_a_launch_asks_nobody_for_a_job_that_training_refuses(here):
    write(here, WRONG["no data"][0])
    ran = CliRunner().invoke(app, ["launch", "job.yaml", "--provider", "local", "--dry-run"])
    assert isinstance(ran.exception, ConfigError)
    assert "so no pod was requested: there is no data to train on" in str(ran.exception)
    store = Store()
    assert (store.wanted.all(), store.events(), store.attempts("job")) == ([], [], [])
    store.close()


def test_models_are_tried_with_what_is_shipped_alone(here):
    (here / "mine.py").write_text("import helper\n\n\ndef build():\n    return helper.build()\n")
    (here / "helper.py").write_text("def build():\n    raise AssertionError('was shipped')\n")
    with pytest.raises(ConfigError, match="No module named 'helper'"):
        prepare_launch(write(here, {"model": "mine.py:build"}), provider="local")


def test_data_of_the_hosts_do_not_hinder_the_check(here):
    fake_train.install(here)
    job = Job.from_dict({**GOOD, "train": {**GOOD["train"], "data": "gs://bucket/tokens"}})
    told = []
    notes = refuse_untrainable(job, make_bundle(job), {}, is_local=False, progress=told.append)
    assert (notes, told) == ([], ["checking model and data as tpukit train does"])
    own = job.replace(model="mine.py:broken")
    (note,) = refuse_untrainable(own, make_bundle(own), {}, is_local=False, progress=told.append)
    assert "gs://bucket/tokens, which only the hosts can read" in note
    assert json.dumps(note)

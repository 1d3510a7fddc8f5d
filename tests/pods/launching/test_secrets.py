"""No secret in what is shown, kept, or seen in a list of processes."""

import json
import sys
import time

import fake_train
import pytest
from child_processes import children

from tpukit.errors import ConfigError
from tpukit.job import Job
from tpukit.job.settings import SettingsView
from tpukit.pods import Store
from tpukit.pods.launching.background import BackgroundRun
from tpukit.pods.launching.launch import prepare_launch, read_variables

SECRET = "hunter2hunter2"


@pytest.fixture
def ready(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TPUKIT_CACHE_DIR", str(tmp_path / "cache"))
    instead = fake_train.install(tmp_path)
    job = Job.from_dict(
        {
            "model": "tiny",
            "on": "v6e-1",
            "train": {"steps": 1, "data": "nowhere.npy"},
            "launch": {"environment": {**instead, "TOKEN": SECRET, "OTHER": "$FROM_HERE"}},
        }
    )
    monkeypatch.setenv("FROM_HERE", SECRET)
    store = Store(tmp_path / "state")
    yield prepare_launch(job, provider="local", name="run", state=store)
    store.close()


def test_nothing_that_is_shown_holds_it(ready):
    shown = [repr(ready), str(ready), repr(ready.job), repr(ready.job.launch), str(ready.manager)]
    shown += [json.dumps(ready.to_dict()), repr(ready.manager.settings), ready.__rich__()]
    shown += [str(SettingsView.of_job(ready.job).to_dict()), str(ready.manager.to_dict())]
    shown += [repr(ready._command())]
    assert not [text for text in shown if SECRET in text]
    variables = ready._command().environment
    assert (variables["TOKEN"], variables["OTHER"]) == (SECRET, SECRET)


def test_a_variable_that_is_not_set_is_named(monkeypatch):
    monkeypatch.delenv("NOT_HERE", raising=False)
    with pytest.raises(ConfigError, match=r"environment\.TOKEN refers to \$NOT_HERE"):
        read_variables({"TOKEN": "$NOT_HERE"})


@pytest.mark.xdist_group("pods-processes")
def test_no_file_and_no_list_of_processes_holds_it(ready, tmp_path, monkeypatch):
    monkeypatch.delenv("FROM_HERE")  # or every child inherits it, as it does from a shell
    monkeypatch.setenv("PYTHONPATH", ":".join(sys.path))
    run = BackgroundRun.start(ready)
    seen = set()
    while run.is_running:
        seen.update(children().values())
        time.sleep(0.01)
    assert any("tpukit.pods.launching.runner" in line for line in seen)
    assert any("tpukit train job.yaml" in line for line in seen)
    assert not [line for line in seen if SECRET in line]
    log = tmp_path / "state" / "runs" / "run" / "log.jsonl"
    assert SECRET in log.read_text(), "what a job prints is its own"
    files = [path for path in tmp_path.rglob("*") if path.is_file() and path != log]
    assert files
    assert not [path for path in files if SECRET.encode() in path.read_bytes()]

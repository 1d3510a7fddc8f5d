"""Runs from a job file to their end: followed, stopped, killed, gone on with."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time

import fake_train
import psutil
import pytest
import yaml
from typer.testing import CliRunner

from tpukit.cli.app import app
from tpukit.errors import ConfigError
from tpukit.pods import Cause, PreemptionHandler, Store
from tpukit.pods.cost import CostReport
from tpukit.pods.launching.background import BackgroundRun, remove_old_logs
from tpukit.pods.launching.launch import LOCK, RUNS, Launch, launch, prepare_launch
from tpukit.pods.launching.run_log import FILE, LaunchResult
from tpukit.pods.listing import PodListing
from tpukit.pods.providers.local.provider import LocalProvider
from tpukit.pods.reconciler import Reconciler
from tpukit.pods.store.locks import holding

pytestmark = pytest.mark.xdist_group("pods-processes")
ON = "2xv6e-1"
COMMAND = (
    "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    "from tpukit.cli.main import run; run()"
)


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with a job, a store and a machine of its own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TPUKIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TPUKIT_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, sys.path)))
    monkeypatch.delenv("TPUKIT_PROVIDER", raising=False)
    write_job(tmp_path)
    return tmp_path


def write_job(folder, steps=20, **launch):
    (folder / "instead").exists() or fake_train.install(folder)
    variables = {"PYTHONPATH": str(folder / "instead"), "TOKEN": "hunter2"}
    job = {
        "model": "tiny",
        "on": ON,
        "batch_size": 2,
        "train": {"steps": steps, "data": "nowhere.npy"},
        "launch": {"environment": variables, **launch},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))


@pytest.fixture
def store(here):
    made = Store()
    yield made
    made.close()


def start(store, steps=20, name="run", folder=None):
    if folder is not None:
        write_job(folder, steps)
    return BackgroundRun.start(prepare_launch("job.yaml", name=name, state=store))


def find(store, name):
    """Return a run that another process is starting."""
    while not (store.folder / "runs" / name / "log.jsonl").exists():
        time.sleep(0.02)
    return BackgroundRun.find(store, name)


def until_step(run, step):
    """Follow a run until it has come that far."""
    with contextlib.closing(run.entries()) as entries:
        for entry in entries:
            if entry.kind == "step" and entry.data["step"] >= step:
                return
            assert not entry.is_final, entry


def saved(here, name="run"):
    return int((here / "runs" / name / "saved").read_text())


def test_in_python_from_a_file_to_its_end(here, store):
    told = []
    outcome = launch("job.yaml", name="run", tell=told.append)
    assert outcome.is_done
    assert saved(here) == 20
    assert [attempt.last_step for attempt in store.attempts("run")] == [20]
    assert store.wanted.all() == []
    assert LocalProvider().list() == []
    (spent,) = store.spend.all("run")
    assert spent.released_at is not None


def test_a_run_in_the_background_is_followed(here, store):
    run = start(store)
    entries = list(run.entries())
    lines = {(entry.host, entry.text) for entry in entries if entry.kind == "line"}
    assert {host for host, _ in lines} == {"run-a1-0", "run-a1-1"}
    assert ("run-a1-0", "begins at 0 with hunter2") in lines
    assert [e.data["step"] for e in entries if e.kind == "step"][-1] == 20
    assert [entry.text for entry in entries if entry.kind in ("pod", "attempt")] == [
        "asking for run-a1 in local-a",
        "run-a1 is ready in local-a: 2 hosts",
        "attempt 1 on run-a1 begins",
        "attempt 1 ended: finished",
        "run-a1 in local-a is released",
    ]
    result = LaunchResult("run", entries[-1], CostReport.of(store, "run"))
    assert (result.exit_code, result.cause) == (0, Cause.DONE)
    assert "no price: 'local' uses your own machines" in result.__rich__()
    again = list(BackgroundRun.find(store, "run").entries(follow=False))
    assert [entry.text for entry in again] == [entry.text for entry in entries]


def test_it_is_stopped_saves_and_goes_on(here, store):
    run = start(store, steps=2000, folder=here)
    until_step(run, 7)
    (row,) = PodListing.look(store, Reconciler(store)).rows
    assert (row.state, row.supervised, row.wanted.pod_name) == ("ready", True, "run-a1")
    assert BackgroundRun.find(store, "run").stop(wait_s=30)
    last = list(run.entries())[-1]
    assert last.data["ending"]["cause"] == "stopped"
    assert LaunchResult("run", last, CostReport.of(store)).exit_code == 0
    step = saved(here)
    assert step >= 7
    assert store.wanted.all() == []
    entries = list(start(store, steps=step + 10, folder=here).entries())
    assert any(entry.text == f"begins at {step} with hunter2" for entry in entries)
    assert entries[-1].data["done"]
    assert len(entries[-1].data["attempts"]) == 2


def test_a_killed_supervisor_leaves_no_process_and_the_next_goes_on(here, store):
    run = start(store, steps=120, folder=here)
    until_step(run, 12)
    jobs = psutil.Process(run.pid).children(recursive=True)
    assert len(jobs) >= 4, "two agents, two processes"
    os.kill(run.pid, signal.SIGKILL)
    assert not psutil.wait_procs(jobs, timeout=10)[1]
    last = list(run.entries())[-1]
    assert last.text.startswith("the supervisor of run has ended: it was killed. Launch the job")
    assert LaunchResult("run", last, CostReport.of(store)).exit_code == 6, "not refused input"
    (row,) = PodListing.look(store, Reconciler(store)).rows
    assert row.supervised is False
    entries = list(start(store, steps=120).entries())
    attempts = entries[-1].data["attempts"]
    assert [one["ending"]["cause"] for one in attempts] == ["supervisor_lost", "done"]
    assert attempts[0]["pod"] == attempts[1]["pod"], "the pod was still good"
    assert saved(here) == 120
    assert LocalProvider().list() == []


def test_one_supervisor_a_run(here, store):
    run = start(store, steps=2000, folder=here)
    until_step(run, 2)
    again = prepare_launch("job.yaml", name="run", state=store)
    for second in (again.run, lambda: BackgroundRun.start(again)):
        with pytest.raises(ConfigError, match="already supervised by another process"):
            second()
    until_step(run, 4)
    run.stop(wait_s=30)


def test_a_broken_program_is_not_started_again(here, store):
    write_job(here, environment={"PYTHONPATH": str(here / "instead"), "FAILS_WITH": "2"})
    entries = list(start(store).entries())
    result = LaunchResult("run", entries[-1], CostReport.of(store, "run"))
    assert result.cause is Cause.BAD_INPUT, result.to_dict()
    assert result.exit_code == 2
    assert len(entries[-1].data["attempts"]) == 1


def test_the_command_shows_it_and_exits_with_its_code(here):
    found = CliRunner().invoke(app, ["launch", "job.yaml", "--name", "run"])
    assert found.exit_code == 0, found.output
    assert "[run-a1-0] begins at 0 with hunter2" in found.stdout
    assert "run: finished" in found.stdout
    logs = CliRunner().invoke(app, ["pods", "logs", "run"])
    assert "[run-a1-1] begins at" in logs.stdout
    cost = CliRunner().invoke(app, ["pods", "cost", "run", "--json"])
    assert [one["run"] for one in json.loads(cost.stdout)["runs"]] == ["run"]


def test_as_json_on_standard_output_alone(here):
    found = CliRunner().invoke(app, ["launch", "job.yaml", "--name", "run", "--json"])
    said = json.loads(found.stdout)
    assert (said["done"], said["exit_code"], said["name"]) == (True, 0, "run")
    assert "begins at 0" in found.stderr


def test_detached_it_tells_that_it_has_ended(here, monkeypatch):
    monkeypatch.setattr("tpukit.cli.launch.FIRST_S", 120.0)
    write_job(here, environment={"PYTHONPATH": str(here / "instead"), "FAILS_WITH": "2"})
    found = CliRunner().invoke(app, ["launch", "job.yaml", "--name", "run", "--detach"])
    assert found.exit_code == 2, found.output
    assert "run: the job or its data were refused" in found.stdout
    assert "background" not in found.stdout


def test_detached_it_runs_on_and_goes_down(here, store):
    write_job(here, steps=2000)
    found = CliRunner().invoke(app, ["launch", "job.yaml", "--name", "run", "--detach"])
    assert found.exit_code == 0
    assert "run goes on in the background: " in found.stdout
    assert "tpukit pods logs run" in found.stdout
    run = find(store, "run")
    until_step(run, 3)
    down = CliRunner().invoke(app, ["pods", "down", "run"])
    assert down.exit_code == 0, down.output
    assert not run.is_running
    assert saved(here) >= 3
    assert LocalProvider().list() == []


@pytest.mark.parametrize(
    ("number", "code", "word"),
    [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")],
)
def test_a_signal_lets_it_save_and_gives_the_pod_back(here, store, number, code, word):
    # Longer than the command itself waits: the supervisor sees to it.
    slow = {"PYTHONPATH": str(here / "instead"), "SAVES_FOR_S": "4"}
    write_job(here, steps=2000, environment=slow)
    command = [sys.executable, "-c", COMMAND, "launch", "job.yaml", "--name", "run"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    until_step(find(store, "run"), 3)
    os.kill(process.pid, number)
    _, errors = process.communicate()
    assert process.returncode == code
    assert errors.endswith(f"run is still saving; tpukit pods logs run shows it\n{word}\n")
    run = BackgroundRun.find(store, "run")
    last = list(run.entries())[-1]
    assert (last.data["ending"]["cause"], last.data["ending"]["evidence"]) == ("stopped", "")
    assert saved(here) >= 3
    assert LocalProvider().list() == []


def test_names_stay_the_same_as_long_as_the_job_does(here, store):
    first = prepare_launch("job.yaml", state=store)
    assert first.name.startswith("job-")
    assert prepare_launch("job.yaml", state=store).name == first.name
    write_job(here, steps=21)
    assert prepare_launch("job.yaml", state=store).name != first.name


def test_what_to_know_is_said_before(here, store):
    write_job(here, provider="ssh", hosts=["a", "b"], python="python3")
    lines = []
    ready = prepare_launch("job.yaml", name="run", state=store, progress=lines.append)
    assert isinstance(ready, Launch)
    assert any("are lost with the pod" in line for line in lines)
    assert lines[-1].startswith("run: ships 1 file, ")


def test_a_preemption_handler_sets_how_often_it_saves(here, store):
    handler = PreemptionHandler(checkpoint_frequency=30, auto_restart=False)
    ready = prepare_launch("job.yaml", name="run", state=store, preemption=handler)
    assert b"checkpoint_seconds: 30" in ready.bundle.files["job.yaml"]
    assert not ready._policy().auto_restart


def test_stopping_is_heard_in_python_too(here, store):
    write_job(here, steps=2000)
    stopping = threading.Event()

    def tell(event):
        if getattr(event, "step", 0) >= 3:
            stopping.set()

    outcome = prepare_launch("job.yaml", name="run", state=store).run(tell, stopping=stopping)
    assert outcome.ending.cause is Cause.STOPPED
    assert saved(here) >= 3


def test_old_logs_go_and_those_of_running_jobs_stay(store):
    runs = [store.folder / RUNS / f"run-{index}" for index in range(5)]
    for index, folder in enumerate(runs):
        folder.mkdir(parents=True)
        (folder / FILE).write_text("")
        os.utime(folder / FILE, (index, index))
    with holding(runs[0] / LOCK):
        remove_old_logs(store, keep=2)
    assert [one.exists() for one in runs] == [True, False, False, True, True]

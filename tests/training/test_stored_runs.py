"""Runs whose directory is an address: on a storage server on loopback, and in fsspec's memory."""

import json
import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import numpy as np
import pytest
from free_ports import free_port
from storage_server import READ_ONLY, storage_server

from tpukit.errors import MissingExtraError, TPUValidationError
from tpukit.observe.runs import Run
from tpukit.records import read_metrics
from tpukit.records.mirror import RunMirror
from tpukit.runtime.object_store import ObjectStore, open_files
from tpukit.training.trained_model import checkpoints_of, existing_path, find_run

WORKER = Path(__file__).with_name("trainer_worker.py")
STEPS = 24
SHAPE = {"batch_size": 8, "sequence_length": 16}

pytestmark = pytest.mark.usefixtures("compile_quickly")


@pytest.fixture(scope="module")
def server():
    with storage_server() as environment:
        yield environment


@pytest.fixture
def gs(server, monkeypatch):
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    open_files.cache_clear()
    yield
    open_files.cache_clear()


@pytest.fixture
def own_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("TPUKIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TPUKIT_STATE_DIR", str(tmp_path / "state"))
    return tmp_path


@pytest.fixture
def machine(tmp_path, tokens, server):
    """(name, words) -> a process with a home, a folder, a cache and data of its own."""

    def start(name, *words, **more):
        home = tmp_path / name
        home.mkdir(exist_ok=True)
        np.save(home / "tokens.npy", tokens)
        environment = {
            **os.environ,
            **server,
            "HOME": str(home),
            "TPUKIT_CACHE_DIR": str(home / "cache"),
            "TPUKIT_STATE_DIR": str(home / "state"),
            "XLA_FLAGS": os.environ["XLA_FLAGS"].replace("count=8", "count=1"),
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
            "SLOW_S": "0.25",
            **more,
        }
        return subprocess.Popen(
            [sys.executable, *words],
            cwd=home,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


def worker(address, *hosts):
    return (str(WORKER), address, "tokens.npy", str(STEPS), *map(str, hosts))


def wait_for_step(process, copy, step):
    """Until a reader sees the step, or the process has ended."""
    while process.poll() is None:
        copy.pull()
        metrics = copy.folder / "metrics.jsonl"
        if metrics.is_file() and metrics.read_text().count("\n") >= step:
            return


def test_a_run_at_an_address_is_written_and_read(table_trainer, tokens, tmp_path, own_folders):
    address = f"memory://bucket/{uuid.uuid4().hex}/run"
    trainer = table_trainer(run_dir=address)
    result = trainer.train(tokens, 4, **SHAPE)
    local = table_trainer(run_dir=str(tmp_path / "local")).train(tokens, 4, **SHAPE)
    assert result.run_dir == address
    assert result.losses == local.losses
    run = Run(address)
    assert [record["loss"] for record in read_metrics(address)] == list(local.losses)
    assert run.summary().reason == "done"
    assert run.summary().path == address
    assert run.goodput().attempts == 1
    assert "done at step 4" in [*run.log()][-1]
    copy, step = find_run(existing_path(f"{address}/checkpoints/2"))
    assert (copy, step) == (run.path.resolve(), 2)
    assert find_run(existing_path(address))[0] == run.path
    assert checkpoints_of(copy) == f"{address}/checkpoints"
    names = {path.name for path in run.path.iterdir() if not path.name.startswith(".")}
    there = {path.name for path in (tmp_path / "local").iterdir()}
    assert names == there - {"run.lock"}
    assert not [*(own_folders / "state" / "runs-being-written").iterdir()], (
        "the local folder is removed"
    )
    with pytest.raises(TPUValidationError, match=f"{address} belongs to another run"):
        table_trainer(run_dir=address).train(tokens, 4, batch_size=4, sequence_length=16)


def test_a_check_reads_and_writes_nothing(table_trainer, tokens, tmp_path, own_folders):
    address = f"memory://bucket/{uuid.uuid4().hex}/run"
    np.save(tmp_path / "tokens.npy", tokens)
    options = {"data": str(tmp_path / "tokens.npy"), "steps": 2}
    trainer = table_trainer(run_dir=address, **options, **SHAPE)
    trainer.check()
    assert ObjectStore(address).names() == []


def test_a_second_process_is_refused_before_its_first_step(
    table_trainer, tokens, own_folders, monkeypatch
):
    address = f"memory://bucket/{uuid.uuid4().hex}/run"
    refusals = []

    class Second:
        def on_start(self, run_dir, identity):
            try:
                table_trainer(run_dir=address).train(tokens, 4, **SHAPE)
            except TPUValidationError as error:
                refusals.append(str(error))

        def on_record(self, record):
            pass

        def on_end(self, result):
            pass

    table_trainer(run_dir=address, own_hooks=[Second()]).train(tokens, 2, **SHAPE)
    assert f"is being written by process {os.getpid()} of " in refusals[0]


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("gs://nowhere/run", "There is no bucket gs://nowhere"),
        (f"gs://{READ_ONLY}/run", "roles/storage.objectUser"),
    ],
)
def test_a_wrong_bucket_is_refused_before_the_first_step(
    table_trainer, tokens, gs, own_folders, address, said
):
    with pytest.raises(TPUValidationError) as refused:
        table_trainer(run_dir=address).train(tokens, 2, **SHAPE)
    assert said in str(refused.value)


def test_a_missing_package_names_its_extra(table_trainer, tokens, gs, own_folders, monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs.core", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'tpukit\[data\]'"):
        table_trainer(run_dir="gs://bucket/run").train(tokens, 2, **SHAPE)


@pytest.mark.slow
def test_a_killed_run_in_a_bucket_ends_as_if_nothing_had_happened(
    table_trainer, tokens, tmp_path, machine, gs, own_folders
):
    address = f"gs://bucket/{uuid.uuid4().hex}/run"
    copy = RunMirror(ObjectStore(address), tmp_path / "reader" / "run")
    process = machine("first", *worker(address))
    wait_for_step(process, copy, 8)
    top = machine("watcher", "-m", "tpukit", "top", address, "--once", "--json")
    shown, errors = top.communicate()
    assert json.loads(shown)["training"]["summary"]["step"] >= 8, errors
    assert process.poll() is None, process.communicate()
    process.send_signal(signal.SIGKILL)
    process.communicate()

    process = machine("second", *worker(address))  # shares nothing with the first but the bucket
    whole = table_trainer(run_dir=str(tmp_path / "whole")).train(tokens, STEPS, **SHAPE)
    _, errors = process.communicate()
    assert process.returncode == 0, errors
    copy.pull()
    records = read_metrics(copy.folder)
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert tuple(record["loss"] for record in records) == whole.losses  # to the bit
    assert "resumed from step " in (copy.folder / "train.log").read_text()
    attempts = Run(copy.folder).attempts()
    assert [attempt.reason for attempt in attempts] == ["killed", "done"]
    assert attempts[1].first_step > 0
    assert not (tmp_path / "first" / "runs").exists()


@pytest.mark.slow
def test_hosts_that_share_no_disk_write_one_run(tmp_path, machine, gs, own_folders):
    address, coordinator = f"gs://bucket/{uuid.uuid4().hex}/run", f"127.0.0.1:{free_port()}"
    processes = [
        machine(f"host{host}", *worker(address, 2, host, coordinator), SLOW_S="0")
        for host in range(2)
    ]
    answers = [process.communicate() for process in processes]
    assert [process.returncode for process in processes] == [0, 0], answers
    run = Run(address)
    assert run.processes() == [0, 1]
    for host in run.processes():
        lines = (run.path / "hosts" / str(host) / "steps.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in lines] == list(range(1, STEPS + 1))
    assert len(read_metrics(address)) == STEPS

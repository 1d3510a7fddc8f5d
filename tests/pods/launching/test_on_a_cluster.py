"""A launch on an emulated cluster: whatever the launching machine does, the job goes on."""

import contextlib
import json
import os
import signal
import sys
import time

import fake_train
import pytest
import yaml
from emulated_cluster import until
from emulated_tpus import forget_settings
from typer.testing import CliRunner

from tpukit.cli.app import app
from tpukit.pods import Store
from tpukit.pods.launching.background import BackgroundRun
from tpukit.pods.launching.launch import prepare_launch
from tpukit.pods.listing import PodListing
from tpukit.pods.reconciler import Reconciler
from tpukit_emulators.kubernetes_api.emulator import KubernetesEmulator, tpu_pool
from tpukit_emulators.kubernetes_api.kinds import CONFIG_MAP, JOBSET, POD, SECRET

pytestmark = pytest.mark.xdist_group("pods-processes")
WEEK_S = 7 * 24 * 3600


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    forget_settings(monkeypatch)
    monkeypatch.setenv("TPUKIT_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("TPUKIT_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, sys.path)))
    with KubernetesEmulator([tpu_pool("v6e-16", name="a")]) as emulator:
        monkeypatch.setenv("KUBECONFIG", str(emulator.kubeconfig))
        job = {
            "model": "tiny",
            "on": "v6e-16",
            "train": {"steps": 10**6, "run_dir": str(tmp_path / "run"), "data": "gs://nowhere"},
            "launch": {
                "provider": "gke",
                "image": "registry/jax:1",
                "environment": fake_train.install(tmp_path),
            },
        }
        (tmp_path / "job.yaml").write_text(yaml.safe_dump(job))
        yield emulator


def start(store):
    return BackgroundRun.start(prepare_launch("job.yaml", name="run", is_checked=True, state=store))


def until_step(run, step):
    with contextlib.closing(run.entries()) as entries:
        for entry in entries:
            if entry.kind == "step" and entry.data["step"] >= step:
                return entry.data["step"]
            assert not entry.is_final, entry
    raise AssertionError("it has ended")


def test_nothing_on_the_launching_machine_ends_the_job(cluster):
    clock = [time.time()]
    store = Store(now=lambda: clock[0])
    killed = start(store)
    step = until_step(killed, 5)
    first = {pod["metadata"]["uid"] for pod in cluster.cluster.store.items(POD)}
    os.kill(killed.pid, signal.SIGKILL)
    until(lambda: not killed.is_running)

    clock[0] += WEEK_S
    for _ in range(2):
        listing = PodListing.look(store, Reconciler(store))
    assert listing.problems == ()
    ((state, supervised),) = [(row.state, row.supervised) for row in listing.rows]
    assert (state, supervised) == ("ready", False)

    told = start(store)  # the same job again: it is followed, not begun again
    step = until_step(told, step + 5)
    os.kill(told.pid, signal.SIGTERM)  # as a machine that shuts down does
    *_, last = told.entries()
    assert "goes on in its cluster" in last.text
    assert {pod["metadata"]["uid"] for pod in cluster.cluster.store.items(POD)} == first

    ended = start(store)
    until_step(ended, step + 5)
    assert ended.stop(60.0)
    *_, last = ended.entries()
    assert last.data["ending"]["cause"] == "stopped"
    for kind in (JOBSET, POD, SECRET, CONFIG_MAP):
        until(lambda kind=kind: not cluster.cluster.store.items(kind))
    assert store.wanted.all() == []
    store.close()


def test_a_dry_run_prints_what_kubectl_takes(cluster, monkeypatch, tmp_path):
    def dry_run(*more):
        return CliRunner().invoke(app, ["launch", "job.yaml", "--name", "run", "--dry-run", *more])

    shown = dry_run()
    assert shown.exit_code == 0, shown.stderr
    assert "accepts the manifest" in shown.stderr
    documents = list(yaml.safe_load_all(shown.stdout))
    assert [document["kind"] for document in documents] == ["ConfigMap", "JobSet"]
    assert documents[-1]["metadata"]["labels"]["tpukit.dev/job"] == "run"
    for kind, document in zip((CONFIG_MAP, JOBSET), documents, strict=True):
        cluster.cluster.admission.admit(kind, document, strict=True)
    assert json.loads(dry_run("--json").stdout)["documents"] == documents
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    alone = dry_run()
    assert "no cluster has checked the manifest" in alone.stderr
    assert list(yaml.safe_load_all(alone.stdout)) == documents
    assert not cluster.cluster.store.items(JOBSET)

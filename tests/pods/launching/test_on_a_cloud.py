"""A launch on the emulated Cloud TPU API: Google's client, real ssh, pods that are taken away."""

import fake_train
import pytest
import yaml
from emulated_tpus import cloud_tpu, forget_settings

from tpukit.pods import Cause, Store, TpuManager, launch
from tpukit.pods.access import ssh_command
from tpukit.pods.config import PodConfig
from tpukit.pods.cost import CostReport
from tpukit_emulators.holding import Zone

pytestmark = pytest.mark.xdist_group("pods-processes")
HERE, THERE = "us-east5-b", "us-east1-d"


@pytest.fixture
def cloud(tmp_path, authority, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TPUKIT_STATE_DIR", str(tmp_path / "state"))
    forget_settings(monkeypatch)
    with cloud_tpu(tmp_path, authority, dict.fromkeys((HERE, THERE), Zone({"v6e": 64}))) as made:
        yield made


@pytest.fixture
def job(tmp_path, cloud):
    said = {
        "model": "tiny",
        "on": "v6e-8",
        "train": {"steps": 60, "run_dir": str(tmp_path / "run"), "data": "gs://nowhere"},
        "launch": {
            **cloud.settings,
            "zone": HERE,
            "zones": [THERE],
            "spot": True,
            "environment": fake_train.install(tmp_path),
        },
    }
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(said))
    return str(path)


def test_a_pod_that_is_taken_away_is_replaced_in_another_zone(cloud, job, tmp_path):
    taken = []

    def tell(event):
        if getattr(event, "step", 0) >= 12 and not taken:
            taken.append(cloud.api.cloud.preempt("run-a1", notice_s=0))

    lines = []
    outcome = launch(job, name="run", tell=tell, progress=lines.append)
    assert taken == [True]
    assert outcome.is_done
    assert (tmp_path / "run" / "saved").read_text() == "60"
    assert [attempt.zone for attempt in outcome.attempts] == [HERE, THERE]
    assert outcome.attempts[0].ending.cause is Cause.SPOT
    assert "$12.35 per hour (prices of 2026" in lines[0]
    store = Store()
    assert store.wanted.all() == []
    report = CostReport.of(store, "run")
    assert [one.zone for one in report.runs[0].intervals] == [HERE, THERE]
    assert report.runs[0].total.origin == "third-party"
    store.close()
    assert not cloud.world.holdings(), "leaked"


def test_a_pod_is_logged_in_to_by_an_argument_list(cloud, tmp_path):
    store = Store()
    manager = TpuManager(**{key: cloud.settings[key] for key in KEYS}, zone=HERE, state=store)
    pod = manager.allocate_pod(PodConfig(tpu_type="v6e-8"), name="run")
    argv = ssh_command(store, "run", 0, opener=lambda _: manager.opened)
    assert argv[0] == "ssh"
    assert argv[-2:] == ["--", pod.hosts[0].address.partition(":")[0]]
    assert "BatchMode=no" in argv
    manager.release(pod)
    assert not cloud.world.holdings()
    store.close()


KEYS = ("provider", "project", "endpoint", "credentials_file")

"""A cluster to rehearse on: served, found by its kubeconfig, told what to do from a shell."""

import json
import urllib.error
import urllib.request

import pytest
from emulated_cluster import Watched, conditions, small_jobset, until

from tpukit.job.sections import LaunchSettings
from tpukit.pods import PodConfig, open_provider
from tpukit.pods.emulation import open_emulator
from tpukit_emulators.kubernetes_api.kinds import WORKLOAD


@pytest.fixture
def cluster(tmp_path, monkeypatch):
    made = open_emulator("gke", tmp_path)
    for variable, value in made.environment.items():
        monkeypatch.setenv(variable, value)
    yield made
    made.close()


def tell(cluster, order, **said):
    url = f"http://{cluster.control.address}/{order}"
    with urllib.request.urlopen(url, json.dumps(said).encode()) as answer:
        return json.load(answer)


def test_the_printed_settings_launch_there(cluster):
    provider = open_provider(None, LaunchSettings(**cluster.settings))
    assert provider.name == "gke"
    for on in ("v5e-16", "v6e-8", "2xv6e-16", "v5p-32", "7x:2x2x2"):
        for spot in (False, True):
            config = PodConfig(tpu_type=on).with_preemptible(spot)
            found = provider.preflight(config)
            assert {one.severity for one in found} == {"ok"}, found


def test_orders_reach_the_cluster(cluster):
    job = Watched(cluster.cluster, small_jobset("gem", "sleep", "60"))
    job.wait_running()
    tell(cluster, "evict", name="gem", host=3)
    job.wait_running(attempt=1)
    with urllib.request.urlopen(f"http://{cluster.control.address}") as shown:
        assert len(json.load(shown)["pods"]) == 4
    with pytest.raises(urllib.error.HTTPError, match="400"):
        tell(cluster, "kill", name="nobody")
    launch = LaunchSettings(image="x", queue="tpu")
    queued = Watched(cluster.cluster, small_jobset("queued", "sleep", "60", launch=launch))
    queued.wait_running()
    tell(cluster, "queue", name="queued")
    (workload,) = cluster.cluster.store.items(WORKLOAD)
    assert "Preempted" in conditions(workload)
    tell(cluster, "drain", name="gem")
    until(lambda: job.status["restarts"] == 2)

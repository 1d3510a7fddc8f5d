"""An emulated cluster that a module of tests shares; each test leaves it empty."""

import pytest
from emulated_cluster import until

from tpukit.job.sections import LaunchSettings
from tpukit.pods.providers.gke.provider import GKEProvider
from tpukit_emulators.kubernetes_api.emulator import KubernetesEmulator, Pace, tpu_pool
from tpukit_emulators.kubernetes_api.kinds import CONFIG_MAP, JOBSET, POD, SECRET

ZONE = "us-central1-a"
POOLS = [
    tpu_pool("v6e-16", name="a", zone=ZONE),
    tpu_pool("v6e-16", name="b", zone=ZONE),
    tpu_pool("v6e-16", name="s", zone=ZONE, spot=True),
]


@pytest.fixture(scope="module")
def shared_emulator():
    pace = Pace(shutdown_grace_s=1.0, node_gone_s=0.2)
    with KubernetesEmulator(POOLS, pace=pace, bookmark_s=0.5) as emulator:
        yield emulator


@pytest.fixture
def emulator(shared_emulator, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", str(shared_emulator.kubeconfig))
    yield shared_emulator
    store = shared_emulator.cluster.store
    shared_emulator.faults.clear()
    shared_emulator.cluster.scheduler.is_stopped = False
    shared_emulator.cluster.kubelet.bad_images.clear()
    for jobset in store.items(JOBSET):
        store.delete(JOBSET, "default", jobset["metadata"]["name"])
    for pod in store.items(POD):
        shared_emulator.mishaps.vanish(pod)
    until(lambda: not store.items(JOBSET) and not store.items(POD))
    until(lambda: shared_emulator.cluster.kubelet.processes.running == 0)
    until(lambda: not store.items(SECRET) and not store.items(CONFIG_MAP))  # nothing is left


@pytest.fixture
def launch():
    return LaunchSettings(image="registry/jax:1", max_restarts=2)


@pytest.fixture
def provider(emulator, launch):
    return GKEProvider(launch)

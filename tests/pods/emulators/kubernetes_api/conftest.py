import pytest

from tpukit_emulators.clock import RealClock
from tpukit_emulators.kubernetes_api.cluster import Cluster, Pace, tpu_pool
from tpukit_emulators.kubernetes_api.emulator import KubernetesEmulator

POOLS = [tpu_pool("v6e-16", name="a"), tpu_pool("v6e-16", name="b")]


@pytest.fixture
def cluster(tmp_path):
    pace = Pace(shutdown_grace_s=0.3, node_gone_s=0.2)
    cluster = Cluster(POOLS, clock=RealClock(), folder=tmp_path / "pods", pace=pace)
    yield cluster
    assert cluster.worker.settle()
    cluster.close()


@pytest.fixture(scope="module")
def emulator():
    pace = Pace(shutdown_grace_s=0.3, node_gone_s=0.2)
    with KubernetesEmulator(POOLS, pace=pace, bookmark_s=0.2, history=400) as emulator:
        yield emulator

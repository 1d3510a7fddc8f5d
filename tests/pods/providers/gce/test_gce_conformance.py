"""Provider gce on the emulated Compute Engine, by the suite for all providers."""

import pytest

from conformance import Case, ProviderConformance
from tpukit.pods.config import PodConfig
from tpukit_emulators.faults import Fault, Mishap

pytestmark = pytest.mark.xdist_group("pods-processes")


class TestComputeEngine(ProviderConformance):
    @pytest.fixture
    def case(self, cloud, provider):
        return Case(
            provider=provider,
            config=PodConfig(tpu_type="tpu7x-2x2x2", zones=("us-central1-c",)),
            lose_reply=lambda: cloud.api.faults.add(
                Fault(Mishap.LOST_REPLY, "instanceGroupManagers.insert")
            ),
            preempt=lambda pod, notice_s: cloud.api.cloud.preempt(pod.name, notice_s=notice_s),
        )


class TestSeveralSlices(ProviderConformance):
    @pytest.fixture
    def case(self, cloud, provider):
        return Case(
            provider=provider,
            config=PodConfig(tpu_type="2xv6e-16", zones=("us-east5-a",)).with_preemptible(),
            preempt=lambda pod, notice_s: cloud.api.cloud.preempt(
                pod.name, notice_s=notice_s, node=1
            ),
        )

"""Provider gcp on the emulated Cloud TPU, by the suite for all providers."""

import pytest

from conformance import Case, ProviderConformance
from tpukit.pods.config import PodConfig
from tpukit_emulators.faults import Fault, Mishap

pytestmark = pytest.mark.xdist_group("pods-processes")


class TestCloudTPU(ProviderConformance):
    @pytest.fixture
    def case(self, cloud, provider):
        return Case(
            provider=provider,
            config=PodConfig(tpu_type="v6e-8", zones=("us-east5-b",)),
            lose_reply=lambda: cloud.api.faults.add(
                Fault(Mishap.LOST_REPLY, "CreateQueuedResource")
            ),
            preempt=lambda pod, notice_s: cloud.api.cloud.preempt(pod.name, notice_s=notice_s),
        )


@pytest.mark.slow
class TestSeveralSlices(ProviderConformance):
    @pytest.fixture
    def case(self, cloud, provider):
        return Case(
            provider=provider,
            config=PodConfig(tpu_type="2xv6e-16", zones=("us-east5-b",)).with_preemptible(),
            preempt=lambda pod, notice_s: cloud.api.cloud.preempt(
                pod.name, notice_s=notice_s, node=1
            ),
        )

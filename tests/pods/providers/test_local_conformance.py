"""Provider local by the suite for all providers."""

import sys
import threading

import pytest

from conformance import Case, ProviderConformance
from tpukit.pods.config import PodConfig
from tpukit.pods.providers.local.provider import LocalProvider

pytestmark = pytest.mark.xdist_group("pods-processes")


class TestLocal(ProviderConformance):
    @pytest.fixture
    def case(self, tmp_path):
        provider = LocalProvider(folder=tmp_path / "pods", hosts=8)

        def preempt(pod, notice_s):
            """Take it away beside the test, which goes on watching."""
            keywords = {"zone": pod.zone, "notice_s": notice_s}
            threading.Thread(target=provider.preempt, args=(pod.name,), kwargs=keywords).start()

        return Case(
            provider=provider,
            config=PodConfig(tpu_type="2xv6e-1", zones=("local-a",)),
            preempt=preempt,
            python=sys.executable,
            bad_zone="mars",  # any name that a cloud's zone may have is one here
        )

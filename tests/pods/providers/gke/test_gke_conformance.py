"""Provider gke on an emulated cluster, by the suite for all providers."""

import pytest

from conformance import Case, ProviderConformance, wait_for_lines
from tpukit.pods.causes import Cause, Kind
from tpukit.pods.config import PodConfig
from tpukit.pods.pod import PodState
from tpukit.pods.providers.protocol import Line, Restarted
from tpukit_emulators.faults import Fault, Mishap

pytestmark = pytest.mark.xdist_group("pods-processes")


class TestGKE(ProviderConformance):
    @pytest.fixture
    def case(self, emulator, provider):
        def preempt(pod, notice_s):
            first = emulator.mishaps.pods_of(pod.name)[0]
            emulator.mishaps.shut_down(first["spec"]["nodeName"])

        return Case(
            provider=provider,
            config=PodConfig(tpu_type="v6e-16", zones=("us-central1-a",), reservation="r"),
            lose_reply=lambda: emulator.faults.add(Fault(Mishap.LOST_REPLY, "create jobsets")),
            preempt=preempt,
        )

    def test_closing_ends_everything_at_once(self, case):
        # Closing only ends the following: the JobSet belongs to its cluster.
        _, gang = case.run("closes-a1", "import time; print('begun', flush=True); time.sleep(600)")
        wait_for_lines(gang, "begun", 4)
        gang.close()
        gang.close()
        assert case.provider.get("closes-a1", zone="").is_ready

    def test_an_eviction_is_not_a_failure(self, case):
        # The JobSet starts again by itself: nothing ends, and the pod is ready again.
        pod, gang = case.run(
            "evicted-a1",
            """
            import signal, sys, time
            def save(*_):
                print("noticed", flush=True)
                sys.exit(0)
            signal.signal(signal.SIGTERM, save)
            print("begun", flush=True)
            time.sleep(600)
            """,
        )
        wait_for_lines(gang, "begun", len(pod.hosts))
        case.preempt(pod, 1.0)
        events = []
        while not any(isinstance(event, Restarted) for event in events):
            events += gang.wait(0.2)
        assert any(isinstance(event, Line) and event.text == "noticed" for event in events)
        (restarted,) = [event for event in events if isinstance(event, Restarted)]
        assert restarted.attempt == 2
        assert restarted.ending.cause is Cause.MAINTENANCE  # the node is no spot
        assert restarted.ending.cause.kind is Kind.EVICTION
        wait_for_lines(gang, "begun", len(pod.hosts))
        case.until("evicted-a1", PodState.READY)
        gang.close()

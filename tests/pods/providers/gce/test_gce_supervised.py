"""A supervised job on the emulated Compute Engine, from the request to its last step."""

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tpukit.pods.causes import Cause
from tpukit.pods.config import PodConfig
from tpukit.pods.pod import Tier
from tpukit.pods.providers.protocol import Command, StepCompleted
from tpukit.pods.supervision.policy import Policy
from tpukit.pods.supervision.supervisor import Supervisor
from tpukit_emulators.faults import Fault, Mishap

pytestmark = pytest.mark.xdist_group("pods-processes")
PROGRAM = Path(__file__).parents[3] / "support" / "light_job.py"
STEPS = 40
CONFIG = PodConfig(tpu_type="tpu7x-2x2x2", zones=("us-central1-c",)).with_preemptible()


def truth():
    total = 0.0
    for step in range(1, STEPS + 1):
        total = total * 0.9 + step
    return [STEPS, total]


@pytest.fixture
def run(cloud, provider, tmp_path):
    """Runs a job to its end, calling `then` at step 12; returns how each attempt ended."""
    folder = tmp_path / "job"
    folder.mkdir()

    def run(then=lambda: None, config=CONFIG):
        waiting = [then]

        def tell(event):
            if isinstance(event, StepCompleted) and event.step == 12 and waiting:
                waiting.pop()()

        argv = ("python3", str(PROGRAM), str(folder), str(STEPS), "0.02")
        command = Command(argv=argv, environment={"JAX_PLATFORMS": "cpu"})
        policy = Policy(poll_s=0.2, grace_s=5.0)
        outcome = Supervisor("light", config, command, provider, policy=policy, tell=tell).run()
        assert outcome.is_done, outcome
        assert json.loads((folder / "saved.json").read_text()) == truth()
        assert not cloud.world.holdings()
        assert not cloud.api.cloud.everything()
        return [attempt.ending.cause for attempt in outcome.attempts]

    return run


@pytest.mark.parametrize("notice_s", [pytest.param(3.0, marks=pytest.mark.slow), 0.0])
def test_a_preempted_job_goes_on_elsewhere(cloud, run, notice_s):
    take = cloud.api.cloud.preempt
    assert run(lambda: take("light-a1", worker=1, notice_s=notice_s)) == [Cause.SPOT, Cause.DONE]


@pytest.mark.slow
def test_maintenance_is_an_eviction(cloud, run):
    def announce():
        cloud.world.announce_maintenance(cloud.api.cloud.full_name("light-a1"), in_s=0.1)

    config = replace(CONFIG, tier=Tier.ON_DEMAND)
    assert run(announce, config) == [Cause.MAINTENANCE, Cause.DONE]


@pytest.mark.slow
def test_a_zone_without_capacity_is_left(cloud, run):
    cloud.world.sell_out("us-east5-a", "v6e")
    zones = ("us-east5-a", "europe-west4-a")
    config = replace(CONFIG, tpu_type="v6e-8", zones=zones, queue_timeout_s=0.5)
    assert run(config=config) == [Cause.DONE]


def test_bad_calls_do_no_harm(cloud, run):
    cloud.api.faults.add(Fault(Mishap.LOST_REPLY, "*", times=None, share=0.3))
    cloud.api.faults.add(Fault(Mishap.OUTAGE, "*", times=None, share=0.2))
    threading.Timer(3.0, cloud.api.faults.clear).start()
    assert run() == [Cause.DONE]

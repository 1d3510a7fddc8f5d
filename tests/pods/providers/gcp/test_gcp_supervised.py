"""A supervised job on the emulated Cloud TPU, from the request to its last step."""

import json
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tpukit.pods.causes import Cause, Kind
from tpukit.pods.config import PodConfig
from tpukit.pods.providers.protocol import Command, StepCompleted
from tpukit.pods.supervision.policy import Policy
from tpukit.pods.supervision.supervisor import Supervisor
from tpukit_emulators.faults import Fault, Mishap

pytestmark = pytest.mark.xdist_group("pods-processes")
JOB = Path(__file__).parents[3] / "support" / "light_job.py"
STEPS = 40
CONFIG = PodConfig(tpu_type="v6e-16", zones=("us-east5-b",)).with_preemptible()


def truth():
    total = 0.0
    for step in range(1, STEPS + 1):
        total = total * 0.9 + step
    return [STEPS, total]


class Job:
    def __init__(self, provider, folder, config=CONFIG):
        self.folder, self.on_step = folder, {}
        folder.mkdir()
        command = Command(
            argv=("python3", str(JOB), str(folder), str(STEPS), "0.02"),
            environment={"JAX_PLATFORMS": "cpu"},
        )
        self.supervisor = Supervisor(
            "light",
            config,
            command,
            provider,
            policy=Policy(poll_s=0.2, grace_s=5.0),
            tell=self.tell,
        )

    def tell(self, event):
        if isinstance(event, StepCompleted):
            self.on_step.pop(event.step, lambda: None)()

    def run(self):
        outcome = self.supervisor.run()
        assert outcome.is_done, outcome
        assert json.loads((self.folder / "saved.json").read_text()) == truth()
        return [attempt.ending.cause for attempt in outcome.attempts]


@pytest.fixture
def job(provider, tmp_path):
    return Job(provider, tmp_path / "job")


def left_over(cloud):
    """Pods that are there and nobody is about to delete."""
    return [held for held in cloud.world.holdings() if held.stage.value != "ending"]


@pytest.mark.parametrize("notice_s", [3.0, pytest.param(0.0, marks=pytest.mark.slow)])
def test_a_preempted_job_goes_on_elsewhere(cloud, job, notice_s):
    job.on_step[12] = lambda: cloud.api.cloud.preempt("light-a1", notice_s=notice_s)
    assert job.run() == [Cause.SPOT, Cause.DONE]
    assert not left_over(cloud)


@pytest.mark.slow
def test_maintenance_is_an_eviction(cloud, job):
    here = "projects/rehearsal/locations/us-east5-b/queuedResources/light-a1"
    job.on_step[12] = lambda: cloud.world.announce_maintenance(here, in_s=0.1)
    first, last = job.run()
    assert (first.kind, last) == (Kind.EVICTION, Cause.DONE)
    assert not left_over(cloud)


def test_a_zone_without_capacity_is_left(cloud, provider, tmp_path):
    cloud.world.sell_out("us-central1-a", "v5p")
    config = replace(
        CONFIG, tpu_type="v5p-8", zones=("us-central1-a", "europe-west4-b"), queue_timeout_s=0.5
    )
    assert Job(provider, tmp_path / "job", config).run() == [Cause.DONE]
    assert not left_over(cloud)


@pytest.mark.slow
def test_bad_calls_do_no_harm(cloud, job):
    cloud.api.faults.add(Fault(Mishap.LOST_REPLY, "*", times=None, share=0.3))
    cloud.api.faults.add(Fault(Mishap.OUTAGE, "*", times=None, share=0.2))
    threading.Timer(3.0, cloud.api.faults.clear).start()
    assert job.run() == [Cause.DONE]
    assert not left_over(cloud)

"""What a supervisor waits for: silent providers, and hosts that were lost for a moment."""

import threading

import pytest
from scripted_provider import ScriptedProvider

from tpukit.errors import ProviderError, ProviderSilent
from tpukit.job.sections import LaunchSettings
from tpukit.pods.causes import Cause, Ending
from tpukit.pods.config import PodConfig
from tpukit.pods.providers.protocol import Command
from tpukit.pods.supervision.journal import Attempt
from tpukit.pods.supervision.policy import Policy
from tpukit.pods.supervision.zone_search import ZoneSearch


class SlowProvider(ScriptedProvider):
    """Creates the pod at the first call, and answers only after some of them."""

    def __init__(self, errors):
        super().__init__()
        self.errors = errors

    def create(self, name, config, *, command=None):
        pod = super().create(name, config, command=command)
        if self.errors:
            raise self.errors.pop()
        return pod


def get(provider, **policy):
    search = ZoneSearch(
        provider, Policy(**policy), tell=lambda event: None, stopping=threading.Event()
    )
    config = PodConfig(tpu_type="v6e-8", zones=("a",))
    return search.get("run-a1", config, command=Command(argv=("x",)), asking=lambda zone: None)


def test_a_create_without_an_answer_is_repeated_and_finds_its_pod():
    provider = SlowProvider([ProviderSilent("no answer"), ProviderSilent("no answer")])
    assert get(provider).name == "run-a1"
    assert list(provider.pods) == [("a", "run-a1")]


def test_a_silent_provider_ends_the_run_after_the_job_s_limit():
    with pytest.raises(ProviderSilent):
        get(SlowProvider([ProviderSilent("no answer")] * 9), outage_s=0.0)


def test_rejected_credentials_are_reported_at_once():
    provider = SlowProvider([ProviderError("wrong key"), ProviderError("wrong key")])
    with pytest.raises(ProviderError, match="wrong key"):
        get(provider)
    assert len(provider.errors) == 1


def test_limits_come_from_the_job():
    launch = LaunchSettings(api_timeout_seconds=7, save_timeout_seconds=90, max_restarts=2)
    assert Policy.of(launch) == Policy(max_restarts=2, outage_s=7.0, grace_s=90.0)


@pytest.mark.parametrize(("last_step", "bad"), [(None, ("h",)), (12, ())])
def test_a_connection_that_broke_between_steps_does_not_cost_the_pod(last_step, bad):
    attempts = [
        Attempt(
            number=number,
            pod="run-a1",
            zone="a",
            slice="v6e-8",
            asked_at=0.0,
            last_step=last_step and last_step * number,
            ending=Ending(Cause.UNREACHABLE, host="h"),
        )
        for number in (1, 2, 3)
    ]
    assert Policy().bad_hosts(attempts) == bad

from datetime import timedelta

import pytest

from tpukit.errors import ConfigError
from tpukit.job import Job
from tpukit.pods import Policy, PreemptionHandler


def test_both_forms_of_document_004_say_the_same():
    built = (
        PreemptionHandler()
        .with_checkpoint_frequency(timedelta(seconds=300))
        .with_auto_restart(True)
        .build()
    )
    assert built.seconds == PreemptionHandler(checkpoint_frequency=300, auto_restart=True).seconds


def test_it_becomes_settings_of_the_job_and_of_its_supervision():
    job = Job.of("tiny", on="v6e-8")
    handler = PreemptionHandler(checkpoint_frequency=300, auto_restart=False)
    assert handler.apply(job).train.checkpoint_seconds == 300
    assert handler.policy() == Policy(auto_restart=False)
    assert handler.policy(Policy(max_restarts=3)) == Policy(max_restarts=3, auto_restart=False)
    assert PreemptionHandler().apply(job).train.checkpoint_seconds is None


@pytest.mark.parametrize("frequency", [0, -1, float("nan"), float("inf"), timedelta(0)])
def test_a_frequency_is_a_time(frequency):
    with pytest.raises(ConfigError, match="expected seconds"):
        PreemptionHandler().with_checkpoint_frequency(frequency).build()


def test_a_job_that_keeps_nothing_is_refused():
    job = Job.of("tiny", on="v6e-8", train={"checkpoint_every": 0})
    with pytest.raises(ConfigError, match="keeps no checkpoints"):
        PreemptionHandler(checkpoint_frequency=60).apply(job)

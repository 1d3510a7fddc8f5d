"""Warm spares of the local provider, with nothing heavy to import."""

import sys
import time

import pytest

from tpukit.job.sections import LaunchSettings
from tpukit.pods import Cause, Command, PodConfig
from tpukit.pods.providers.local import provider as local_provider
from tpukit.pods.providers.local.provider import LocalProvider
from tpukit.pods.providers.protocol import Ended, Line, StepCompleted

PROGRAM = """
import os, sys, time
from tpukit.records.reporting import report_step
print(os.environ["TPUKIT_ATTEMPT"], "early" in sys.modules, flush=True)
report_step(1)
time.sleep(600 if "stay" in sys.argv else 0)
"""


@pytest.fixture
def provider(tmp_path, monkeypatch):
    (tmp_path / "early.py").write_text("")
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local_provider, "MODULES", ("early",))
    provider = LocalProvider(LaunchSettings(warm_spares=True), folder=tmp_path / "pods")
    yield provider
    provider.close()


def until(gang, wanted):
    events, deadline = [], time.monotonic() + 20
    while sum(isinstance(event, wanted) for event in events) < (1 if wanted is Ended else 2):
        assert time.monotonic() < deadline, events
        events += gang.wait(1)
    return events


def test_spares_are_made_after_the_first_step_and_become_the_next_attempt(provider):
    pod = provider.create("job-a1", PodConfig(tpu_type="2xv6e-1"))
    argv = (sys.executable, "-m", "program")
    gang = provider.start(pod, Command(argv=(*argv, "stay")), attempt=1)
    assert provider.count_ready_spares() == 0
    events = until(gang, StepCompleted)
    assert Line("job-a1-0", "1 False") in events
    deadline = time.monotonic() + 20
    while provider.count_ready_spares() < 2:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    gang.close()
    again = provider.start(pod, Command(argv=argv), attempt=2)
    assert provider.count_ready_spares() == 0
    events = until(again, Ended)
    assert Line("job-a1-1", "2 True") in events  # it had imported before it was told what to do
    assert events[-1].ending.cause is Cause.DONE
    again.close()


def test_spares_end_with_their_provider_and_dead_ones_are_replaced(provider):
    pool = provider._spares
    pool.keep(2)
    dead, living = pool._waiting
    dead.kill()
    dead.wait()
    pool.keep(2)
    kept = list(pool._waiting)
    assert living in kept
    assert dead not in kept
    provider.close()
    assert len(kept) == 2
    assert all(spare.poll() is not None for spare in kept)

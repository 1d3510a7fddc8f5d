"""Supervision of a light job on local pods: real agents and real kills, no jax."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from tpukit.pods.causes import Cause, Ending
from tpukit.pods.config import PodConfig
from tpukit.pods.pod import Tier
from tpukit.pods.providers.local.provider import LocalProvider
from tpukit.pods.providers.protocol import Command, StepCompleted
from tpukit.pods.supervision.journal import Attempt, PodReady, PodRefused, PodReleased
from tpukit.pods.supervision.policy import Policy
from tpukit.pods.supervision.supervisor import Supervisor

JOB = Path(__file__).parents[2] / "support" / "light_job.py"
STEPS = 60
FOUR, TWO = PodConfig(tpu_type="4xv6e-1"), PodConfig(tpu_type="2xv6e-1")


def truth(steps=STEPS):
    total = 0.0
    for step in range(1, steps + 1):
        total = total * 0.9 + step
    return total


class FileJournal:
    """Attempts in a file, for supervisors that are killed."""

    def __init__(self, path):
        self.path = path

    def record(self, job, attempt):
        kept = {one.number: one for one in self.attempts(job)} | {attempt.number: attempt}
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps([one.to_dict() for one in kept.values()]))
        partial.replace(self.path)

    def attempts(self, job):
        if not self.path.exists():
            return []
        return [Attempt.from_dict(one) for one in json.loads(self.path.read_text())]


class Run:
    """A supervised light job, and what it told."""

    def __init__(self, tmp_path, *, config=FOUR, hosts=None, steps=STEPS, journal=None, **policy):
        self.folder = tmp_path / "job"
        self.folder.mkdir(exist_ok=True)
        self.provider = LocalProvider(folder=tmp_path / "pods", hosts=hosts)
        self.events, self.on_step = [], {}
        self.supervisor = Supervisor(
            "light",
            config,
            Command(argv=(sys.executable, str(JOB), str(self.folder), str(steps), "0.01")),
            self.provider,
            journal,
            policy=Policy(**{"poll_s": 0.2, "grace_s": 10.0, **policy}),
            tell=self.tell,
        )

    def tell(self, event):
        self.events.append(event)
        if isinstance(event, StepCompleted):
            self.on_step.pop(event.step, lambda: None)()

    def trouble(self, text):
        (self.folder / "trouble.py").write_text(text)

    def pid(self, rank):
        return int((self.folder / f"pid-{rank}").read_text())

    def saved(self):
        return json.loads((self.folder / "saved.json").read_text())

    def causes(self, outcome):
        return [attempt.ending.cause for attempt in outcome.attempts]

    def finish(self):
        outcome = self.supervisor.run()
        assert self.provider.list() == []  # nothing is kept that costs
        ready = [event.pod.name for event in self.events if isinstance(event, PodReady)]
        released = [event.pod.name for event in self.events if isinstance(event, PodReleased)]
        assert set(ready) <= set(released)
        return outcome


def test_a_job_runs_to_its_end_and_gives_its_pod_back(tmp_path):
    run = Run(tmp_path)
    outcome = run.finish()
    assert outcome.is_done
    assert run.saved() == [STEPS, truth()]
    (attempt,) = outcome.attempts
    assert (attempt.pod, attempt.zone, attempt.slice) == ("light-a1", "local-a", "4xv6e-1")
    assert (attempt.first_step, attempt.last_step) == (1, STEPS)
    assert outcome.losses == ()


@pytest.mark.parametrize("victim", [0, 3])
def test_a_killed_process_costs_a_restart_on_the_same_pod(tmp_path, victim):
    run = Run(tmp_path, max_restarts=1)
    run.on_step[23] = lambda: os.kill(run.pid(victim), signal.SIGKILL)
    outcome = run.finish()
    assert run.causes(outcome) == [Cause.KILLED, Cause.DONE]
    assert outcome.attempts[0].ending.host == f"light-a1-{victim}"
    assert {attempt.pod for attempt in outcome.attempts} == {"light-a1"}
    assert run.saved() == [STEPS, truth()]
    (loss,) = outcome.losses
    resumed_from = outcome.attempts[1].first_step - 1
    assert resumed_from % 5 == 0
    # A step that was saved may not have been told by the time of the kill: nothing is lost then.
    assert loss.lost_steps == max(0, outcome.attempts[0].last_step - resumed_from)
    assert 0 < loss.downtime_s < 20


def test_the_budget_is_for_failures_only(tmp_path):
    run = Run(tmp_path, max_restarts=2, steps=10_000)
    # Others may have gone on past that step, and saved, before they were stopped.
    run.trouble("if rank == 1 and step >= 10 * attempt: os.kill(os.getpid(), 9)")
    outcome = run.finish()
    assert run.causes(outcome) == [Cause.KILLED] * 3
    assert outcome.reason == "max_restarts is 2, and this was failure 3"


def test_a_crash_at_the_same_step_is_no_matter_of_infrastructure(tmp_path):
    run = Run(tmp_path)
    run.trouble("if step == 7: os.abort()")
    outcome = run.finish()
    assert outcome.reason == "3 attempts in a row failed without reaching a new step"
    assert len(outcome.attempts) == 4


def test_an_error_of_the_program_stops_at_once_with_its_last_words(tmp_path):
    run = Run(tmp_path)
    run.trouble("if rank == 2: sys.exit('error: the data are gone')")
    outcome = run.finish()
    assert run.causes(outcome) == [Cause.FAILED]
    assert outcome.ending.evidence == "exit code 1; error: the data are gone"


def test_a_preempted_pod_is_replaced_and_costs_no_restart(tmp_path):
    run = Run(tmp_path, config=PodConfig(tpu_type="4xv6e-1", tier=Tier.SPOT), max_restarts=0)
    run.on_step[13] = lambda: run.provider.preempt("light-a1", zone="local-a")
    run.on_step[31] = lambda: run.provider.preempt("light-a2", zone="local-a", notice_s=5)
    outcome = run.finish()
    assert run.causes(outcome) == [Cause.SPOT, Cause.SPOT, Cause.DONE]
    assert [attempt.pod for attempt in outcome.attempts] == ["light-a1", "light-a2", "light-a3"]
    assert run.saved() == [STEPS, truth()]
    assert outcome.losses[1].lost_steps == 0  # there was time to save


def test_evictions_end_the_job_where_that_is_wanted(tmp_path):
    run = Run(tmp_path, auto_restart=False)
    run.on_step[13] = lambda: os.kill(run.pid(0), signal.SIGTERM)
    outcome = run.finish()
    assert run.causes(outcome) == [Cause.NOTICE]
    assert outcome.reason == "auto_restart is off, and it was evicted"


def test_the_next_zone_is_asked_where_one_has_no_room(tmp_path):
    zones = ("local-a", "local-b", "local-c")
    config = PodConfig(tpu_type="4xv6e-1", zones=zones, queue_timeout_s=0.3)
    run = Run(tmp_path, config=config, hosts={"local-a": 0, "local-b": 4, "local-c": 4})
    run.provider.create("other", PodConfig(tpu_type="v6e-16", zones=("local-b",)))
    outcome = run.supervisor.run()
    assert outcome.is_done
    refused = {event.zone: event.cause for event in run.events if isinstance(event, PodRefused)}
    assert refused == {"local-a": Cause.STOCKOUT, "local-b": Cause.WAITED_TOO_LONG}
    assert outcome.attempts[-1].zone == "local-c"
    assert [pod.name for pod in run.provider.list()] == ["other"]


def test_no_capacity_anywhere_ends_with_the_reason(tmp_path):
    outcome = Run(tmp_path, hosts=2).finish()
    assert (outcome.ending.cause, outcome.reason) == (Cause.UNPLACEABLE, "no zone has capacity")
    assert [attempt.ending.cause for attempt in outcome.attempts] == [Cause.UNPLACEABLE]
    outcome = Run(tmp_path, hosts=0, patience_s=1.5).finish()
    assert outcome.ending.cause is Cause.STOCKOUT


def test_a_dirty_host_is_left_behind_with_its_pod(tmp_path):
    run = Run(tmp_path)
    run.trouble("if attempt == 1 and rank == 3: sys.exit(202)")
    outcome = run.finish()
    assert run.causes(outcome) == [Cause.DIRTY_HOST, Cause.DONE]
    assert [attempt.pod for attempt in outcome.attempts] == ["light-a1", "light-a2"]
    assert Policy().bad_hosts(outcome.attempts) == ("light-a1-3",)


def test_storage_that_failed_is_tried_again_later_and_no_host_is_blamed():
    ended = Ending(Cause.STORAGE, host="host-0")
    where = {"pod": "light-a1", "zone": "local-a", "slice": "v6e-4"}
    first = Attempt(number=1, **where, asked_at=0.0, last_step=7, ending=ended)
    again = replace(first, number=2)
    policy = Policy()
    assert policy.why_stop([first]) is None
    assert (policy.pause_s([first]), policy.pause_s([first, again])) == (0.0, 60.0)
    assert policy.bad_hosts([first, again, replace(first, number=3)]) == ()


def test_resizing_saves_first_and_loses_no_step(tmp_path):
    run = Run(tmp_path)
    run.on_step[12] = lambda: run.supervisor.resize(TWO)
    run.on_step[41] = lambda: run.supervisor.resize(FOUR)
    outcome = run.finish()
    assert [attempt.slice for attempt in outcome.attempts] == ["4xv6e-1", "2xv6e-1", "4xv6e-1"]
    assert run.causes(outcome) == [Cause.STOPPED, Cause.STOPPED, Cause.DONE]
    assert outcome.attempts[0].ending.evidence == "to continue as 2xv6e-1"
    assert [loss.lost_steps for loss in outcome.losses] == [0, 0]
    assert run.saved() == [STEPS, truth()]


def test_a_job_that_was_stopped_goes_on_when_it_is_run_again(tmp_path):
    journal = FileJournal(tmp_path / "journal.json")
    run = Run(tmp_path, journal=journal, steps=STEPS)
    run.on_step[10] = run.supervisor.stop
    outcome = run.finish()
    assert (run.causes(outcome), outcome.is_done) == ([Cause.STOPPED], False)
    again = Run(tmp_path, journal=journal)
    assert again.finish().is_done
    assert again.saved() == [STEPS, truth()]
    done = Run(tmp_path, journal=journal).finish()
    assert (done.is_done, len(done.attempts)) == (True, 2)  # and is not run a third time


def test_stopping_while_a_pod_is_waited_for(tmp_path):
    run = Run(tmp_path, hosts=4)
    run.provider.create("other", PodConfig(tpu_type="v6e-16", zones=("local-a",)))
    threading.Timer(0.5, run.supervisor.stop).start()
    outcome = run.supervisor.run()
    assert run.causes(outcome) == [Cause.STOPPED]
    assert [pod.name for pod in run.provider.list()] == ["other"]


SUPERVISE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_supervisor import FileJournal, Run
folder = Path(sys.argv[2])
Run(folder, journal=FileJournal(folder / "journal.json")).supervisor.run()
"""


def test_a_pod_that_a_finished_job_has_left_is_given_back(tmp_path):
    journal = FileJournal(tmp_path / "journal.json")
    assert Run(tmp_path, journal=journal).finish().is_done
    again = Run(tmp_path, journal=journal)
    again.provider.create("light-a1", FOUR)  # as if its supervisor had been killed before that
    outcome = again.finish()
    assert (outcome.is_done, len(outcome.attempts)) == (True, 1)


def test_another_supervisor_goes_on_where_one_was_killed(tmp_path):
    here = str(Path(__file__).parent)
    with subprocess.Popen([sys.executable, "-c", SUPERVISE, here, str(tmp_path)]) as first:
        journal = FileJournal(tmp_path / "journal.json")
        while not journal.attempts("light") or not journal.attempts("light")[0].last_step:
            time.sleep(0.05)
        time.sleep(0.4)
        pids = [int((tmp_path / "job" / f"pid-{rank}").read_text()) for rank in range(4)]
        first.kill()
    deadline = time.monotonic() + 5
    while any(map(psutil.pid_exists, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(psutil.pid_exists, pids))  # nobody supervises them, so they are gone
    run = Run(tmp_path, journal=journal)
    while "processes are gone" not in run.provider.list()[0].reason:
        assert time.monotonic() < deadline
    outcome = run.finish()
    assert run.causes(outcome) == [Cause.SUPERVISOR_LOST, Cause.DONE]
    assert {attempt.pod for attempt in outcome.attempts} == {"light-a1"}  # the pod was still good
    assert run.saved() == [STEPS, truth()]

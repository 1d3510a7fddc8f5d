"""Real training under a supervisor: whatever is killed, the losses are those of a quiet run."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from tpukit.pods import Command, PodConfig, Policy, Supervisor
from tpukit.pods.causes import Cause
from tpukit.pods.providers.local.provider import LocalProvider
from tpukit.pods.providers.protocol import StepCompleted
from tpukit.pods.store import Store
from tpukit.pods.supervision.journal import AttemptBegan
from tpukit.records import read_metrics

pytestmark = pytest.mark.xdist_group("pods-processes")

STEPS = 24
MODEL = """
import jax, os, time
from tpukit.step.workload import Workload

def build():
    def init(rng):
        return {"table": 0.1 * jax.random.normal(rng, (32, 32))}

    def apply(params, batch):
        jax.debug.callback(lambda: time.sleep(float(os.environ["STEP_S"])))  # to be killed in
        return params["table"][batch["inputs"]]

    return Workload((init, apply), batch_size=8, sequence_length=16)
"""


class Run:
    """A supervised run of a small model, with what happens to it at which step."""

    def __init__(self, folder, name, *, hosts=2, heartbeat_s=10, step_s=0.02):
        (folder / "table.py").write_text(MODEL)
        if not (folder / "tokens.npy").exists():
            np.save(folder / "tokens.npy", np.random.default_rng(0).integers(0, 32, 9000))
        self.run_dir = folder / name
        self.provider = LocalProvider(folder=folder / "pods")
        self.store = Store(folder / "state")
        train = [f"{folder / 'table.py'}:build", "--data", str(folder / "tokens.npy")]
        train += ["--batch", "8", "--sequence", "16", "--steps", str(STEPS)]
        train += ["--run-dir", str(self.run_dir), "--checkpoint-every", "4"]
        self.supervisor = Supervisor(
            name,
            PodConfig(tpu_type=f"{hosts}xv6e-1"),
            Command(
                argv=(sys.executable, "-m", "tpukit", "train", *train),
                environment={"TPUKIT_CACHE_DIR": str(folder / "cache"), "STEP_S": str(step_s)},
                heartbeat_s=heartbeat_s,
            ),
            self.provider,
            self.store,
            policy=Policy(poll_s=1.0),
            tell=self.tell,
        )
        self.at, self.on_attempt = {}, {}

    def tell(self, event):
        if isinstance(event, AttemptBegan):
            self.on_attempt.pop(event.attempt.number, lambda: None)()
        if isinstance(event, StepCompleted):
            for step in [step for step in self.at if step <= event.step]:
                self.at.pop(step)()

    def signal(self, rank, number=signal.SIGKILL):
        """Signal the training process of a rank."""
        for process in psutil.Process().children(recursive=True):
            # Those of other ranks may be on their way out.
            with contextlib.suppress(psutil.NoSuchProcess):
                started = "train" in process.cmdline()
                if started and process.environ()["TPUKIT_HOST_ID"] == str(rank):
                    process.send_signal(number)
                    return
        raise LookupError(rank)

    def finish(self):
        outcome = self.supervisor.run()
        self.store.close()
        assert outcome.is_done, outcome
        assert self.provider.list() == []
        return outcome

    def losses(self):
        return [record["loss"] for record in read_metrics(self.run_dir)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("recovery")


@pytest.fixture(scope="module")
def quiet(folder):
    run = Run(folder, "quiet")
    run.finish()
    return run.losses()


def test_killed_processes_leave_no_trace_in_the_losses(folder, quiet):
    run = Run(folder, "killed")
    pick = random.Random(os.getpid())
    first, second = pick.randint(5, 9), pick.randint(14, 18)
    run.at = {first: lambda: run.signal(1), second: lambda: run.signal(0)}  # then the coordinator
    outcome = run.finish()
    endings = [attempt.ending for attempt in outcome.attempts]
    assert [ending.cause for ending in endings] == [Cause.KILLED, Cause.KILLED, Cause.DONE]
    assert [ending.host for ending in endings] == ["killed-a1-1", "killed-a1-0", ""]
    assert run.losses() == quiet, (first, second)  # to the bit


@pytest.mark.slow
def test_a_stopped_process_is_found_by_the_heartbeat(folder, quiet):
    run = Run(folder, "stopped", heartbeat_s=10)
    sent = []
    run.at = {9: lambda: (sent.append(time.time()), run.signal(1, signal.SIGSTOP))}
    outcome = run.finish()
    ending = outcome.attempts[0].ending
    assert (ending.cause, ending.host) == (Cause.HUNG, "stopped-a1-1")
    assert "did not answer within 10 s" in ending.evidence
    assert run.losses() == quiet


@pytest.mark.slow
def test_a_notice_to_one_process_saves_the_step_of_all(folder, quiet):
    run = Run(folder, "noticed", step_s=0.2)  # so that steps are left when all have heard of it
    run.at = {9: lambda: run.signal(1, signal.SIGTERM)}
    outcome = run.finish()
    assert [attempt.ending.cause for attempt in outcome.attempts] == [Cause.NOTICE, Cause.DONE]
    assert [loss.lost_steps for loss in outcome.losses] == [0]
    assert run.losses() == quiet


SUPERVISE = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_real_recovery import Run
Run(Path(sys.argv[2]), "orphaned").supervisor.run()
"""


@pytest.mark.slow
def test_a_killed_supervisor_leaves_nothing_and_another_goes_on(folder, quiet):
    here = str(Path(__file__).parent)
    with subprocess.Popen([sys.executable, "-c", SUPERVISE, here, str(folder)]) as first:
        store = Store(folder / "state")
        while not any(attempt.last_step for attempt in store.attempts("orphaned")):
            time.sleep(0.05)
        family = psutil.Process(first.pid).children(recursive=True)
        first.kill()
    store.close()
    assert psutil.wait_procs(family, timeout=5)[1] == []
    run = Run(folder, "orphaned")
    outcome = run.finish()
    causes = [attempt.ending.cause for attempt in outcome.attempts]
    assert causes == [Cause.SUPERVISOR_LOST, Cause.DONE]
    assert run.losses() == quiet


@pytest.mark.slow
def test_resizing_goes_on_with_the_same_loss(folder, quiet):
    run = Run(folder, "resized", hosts=4, step_s=0.2)
    two, four = (PodConfig(tpu_type=f"{hosts}xv6e-1") for hosts in (2, 4))
    run.at = {3: lambda: run.supervisor.resize(two)}
    run.on_attempt = {2: lambda: run.at.update({1: lambda: run.supervisor.resize(four)})}
    outcome = run.finish()
    assert [attempt.slice for attempt in outcome.attempts] == ["4xv6e-1", "2xv6e-1", "4xv6e-1"]
    assert [loss.lost_steps for loss in outcome.losses] == [0, 0]
    assert run.losses() == pytest.approx(quiet, rel=1e-5)

"""A running job whose size follows its scaler, with the losses of a run that was left alone."""

import json
import sys
import time

import numpy as np
import pytest

from tpukit.pods import (
    AutoScaler,
    Command,
    JobScaling,
    PodConfig,
    Policy,
    ScalingPolicy,
    Store,
    Supervisor,
)
from tpukit.pods.providers.local.provider import LocalProvider
from tpukit.records import read_metrics

CONFIG = PodConfig(tpu_type="v6e-16")
STEPS = 40
MODEL = """
import jax, time
from tpukit.step.workload import Workload

def build():
    def init(rng):
        return {"table": 0.1 * jax.random.normal(rng, (32, 32))}

    def apply(params, batch):
        jax.debug.callback(lambda: time.sleep(0.2))  # long enough to be resized in
        return params["table"][batch["inputs"]]

    return Workload((init, apply), batch_size=8, sequence_length=16)
"""


class Resized:
    def __init__(self):
        self.configs = []

    def resize(self, config):
        self.configs.append(config)


def write(folder, *, first=1, last=10, stalled=0.0):
    folder.mkdir(exist_ok=True)
    with (folder / "metrics.jsonl").open("a") as file:
        for step in range(first, last + 1):
            record = {"step": step, "step_time_s": 1.0, "input_stall_s": stalled}
            file.write(json.dumps(record | {"time": time.time()}) + "\n")


def test_a_decision_is_carried_out_once(tmp_path):
    job, told = Resized(), []
    scaler = AutoScaler(minimum_lifetime_s=0.0, resize_s=0.0, least_goodput=0.0).build()
    scaling = JobScaling(scaler, tmp_path / "run", job, CONFIG, tell=told.append)
    assert scaling.look() is None  # nothing is there yet
    write(tmp_path / "run", stalled=0.7)
    decision = scaling.look()
    assert decision.config.slice.chips < 16
    assert job.configs == [decision.config] == [scaling.config]
    assert told == [decision]
    assert scaling.look() is None  # what was measured before is of the pod before
    write(tmp_path / "run", first=11, last=20, stalled=0.15)
    assert not scaling.look()
    assert len(job.configs) == 1


def test_what_is_left_has_to_win_a_change_back(tmp_path):
    job = Resized()
    scaler = AutoScaler(minimum_lifetime_s=0.0, resize_s=700.0, least_goodput=0.0).build()
    write(tmp_path / "run")
    scaling = JobScaling(scaler, tmp_path / "run", job, CONFIG, steps=30)
    scaling._since = 0.0
    decision = scaling.look()
    assert "would not recover that" in decision.reason
    assert job.configs == []


@pytest.mark.slow
@pytest.mark.xdist_group("pods-processes")
def test_a_real_job_goes_on_with_fewer_processes_and_the_same_losses(tmp_path):
    (tmp_path / "table.py").write_text(MODEL)
    np.save(tmp_path / "tokens.npy", np.random.default_rng(0).integers(0, 32, 9000))

    def run(name, *, max_cores=None):
        run_dir, store = tmp_path / name, Store(tmp_path / "state")
        train = [f"{tmp_path / 'table.py'}:build", "--data", str(tmp_path / "tokens.npy")]
        train += ["--batch", "8", "--sequence", "16", "--steps", str(STEPS)]
        train += ["--run-dir", str(run_dir), "--checkpoint-every", "4"]
        config = PodConfig(tpu_type="2xv6e-1")
        supervisor = Supervisor(
            name,
            config,
            Command(
                argv=(sys.executable, "-m", "tpukit", "train", *train),
                environment={"TPUKIT_CACHE_DIR": str(tmp_path / "cache")},
            ),
            LocalProvider(folder=tmp_path / "pods"),
            store,
            policy=Policy(poll_s=1.0),
        )
        scaler = AutoScaler(policy=ScalingPolicy.COST_BASED, max_cores=max_cores or 2, min_cores=1)
        scaler = scaler if max_cores else AutoScaler(minimum_lifetime_s=1e6)
        told = []
        scaling = JobScaling(
            scaler.build(), run_dir, supervisor, config, every_s=0.5, tell=told.append
        )
        with scaling:
            outcome = supervisor.run()
        store.close()
        assert outcome.is_done, outcome
        return [record["loss"] for record in read_metrics(run_dir)], outcome, told

    quiet, _, none = run("quiet")
    losses, outcome, told = run("resized", max_cores=1)
    assert none == []
    assert [str(decision.config.slice) for decision in told] == ["v6e-1"]
    assert [attempt.slice for attempt in outcome.attempts] == ["2xv6e-1", "v6e-1"]
    assert len(losses) == STEPS
    assert losses == pytest.approx(quiet, rel=1e-5)

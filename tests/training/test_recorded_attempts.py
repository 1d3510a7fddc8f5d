"""What a run writes about its own attempts, against its result and against a clock outside."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tpukit.observe import Run
from tpukit.records import read_events, read_metrics
from tpukit.records.host_steps import parse_steps, steps_file
from tpukit.training.failure import LossGuard

WORKER = Path(__file__).with_name("trainer_worker.py")
SHAPE = {"batch_size": 8, "sequence_length": 16}

pytestmark = pytest.mark.usefixtures("compile_quickly")


def host_steps(run_dir, process=0):
    return list(parse_steps(steps_file(run_dir, process).read_bytes().splitlines()))


def test_events_say_where_the_time_of_a_result_went(table_trainer, tokens, tmp_path):
    run_dir = tmp_path / "run"
    trainer = table_trainer(checkpoint_every=4, run_dir=str(run_dir))
    result = trainer.train(tokens, 10, **SHAPE)
    events = read_events(run_dir / "events.jsonl")
    start, *_, end = events
    assert (start.event, start.data["attempt"], start.data["step"]) == ("attempt started", 0, 0)
    assert (start.data["total_steps"], start.data["device_kind"]) == (10, "cpu")
    assert (end.event, end.data["reason"], end.data["step"]) == ("attempt ended", "done", 10)
    assert [event.data["step"] for event in events if event.event == "saved"] == [4, 8, 10]
    goodput = Run(run_dir).goodput()
    assert goodput.attempts == 1
    assert goodput.total.productive_s == pytest.approx(result.goodput.productive_s)
    for cause, seconds in result.goodput.spent_s.items():
        if seconds:
            assert goodput.badput_s[cause] == pytest.approx(seconds), cause
    assert goodput.total.wall_s == pytest.approx(result.goodput.wall_s, abs=0.1)
    steps = host_steps(run_dir)
    assert [step.step for step in steps] == list(range(1, 11))
    assert [step.step_time_s for step in steps] == pytest.approx(result.step_times_s, rel=1e-4)
    assert [step.step for step in steps if step.checkpoint_s] == [5, 9]
    summary = Run(run_dir).summary()
    assert (summary.state, summary.reason, summary.step) == ("ended", "done", 10)
    assert summary.checkpoint_step == 10
    assert summary.loss == result.loss


def test_a_roll_back_is_lost_time(table_trainer, tokens, tmp_path, monkeypatch):
    run_dir = tmp_path / "run"
    trainer = table_trainer(checkpoint_every=5, run_dir=str(run_dir), on_bad_loss="rollback")
    observe, bad = LossGuard.observe, [7]

    def observe_a_nan(guard, step, loss, norm=None):
        if step in bad:
            bad.remove(step)
            loss = float("nan")
        return observe(guard, step, loss, norm)

    monkeypatch.setattr(LossGuard, "observe", observe_a_nan)
    result = trainer.train(tokens, 10, **SHAPE)
    assert result.rollbacks == 1
    goodput = Run(run_dir).goodput()
    assert goodput.lost_steps == 2
    lost = [step for step in host_steps(run_dir) if step.step in (6, 7)][:2]
    seconds = sum(step.step_time_s - step.input_stall_s for step in lost)
    assert goodput.badput_s["lost"] == pytest.approx(seconds, rel=1e-3)
    assert goodput.badput_s["lost"] == pytest.approx(result.goodput.spent_s["lost"])
    assert [record["step"] for record in read_metrics(run_dir)] == list(range(1, 11))


def test_a_run_that_fails_says_so(table_trainer, tokens, tmp_path):
    class Failing:
        """A hook that breaks down."""

        def on_start(self, run_dir, identity):
            pass

        def on_record(self, record):
            if record["step"] == 3:
                raise RuntimeError("no more")

        def on_end(self, result):
            pass

    run_dir = tmp_path / "run"
    with pytest.raises(RuntimeError, match="no more"):
        table_trainer(run_dir=str(run_dir), own_hooks=[Failing()]).train(tokens, 10, **SHAPE)
    end = read_events(run_dir / "events.jsonl")[-1]
    assert (end.data["reason"], end.data["step"]) == ("failed", 3)
    assert "no more" in end.data["error"]
    assert Run(run_dir).summary().state_in_words == "ended: failed"


def test_a_preempted_run_loses_nothing(table_trainer, tokens, tmp_path):
    class Told:
        """Sends this process the signal that a spot machine gets."""

        def on_start(self, run_dir, identity):
            pass

        def on_record(self, record):
            if record["step"] == 4:
                os.kill(os.getpid(), signal.SIGTERM)

        def on_end(self, result):
            pass

    run_dir = tmp_path / "run"
    stopped = table_trainer(checkpoint_every=100, run_dir=str(run_dir), own_hooks=[Told()])
    first = stopped.train(tokens, 10, **SHAPE)
    assert first.stopped == "preempted"
    second = table_trainer(checkpoint_every=100, run_dir=str(run_dir)).train(tokens, 10, **SHAPE)
    events = read_events(run_dir / "events.jsonl")
    (notice,) = [event for event in events if event.event == "preempted"]
    assert notice.data["step"] == first.steps
    assert notice.data["signal"] == "SIGTERM"
    starts = [event.data for event in events if event.event == "attempt started"]
    assert [(one["attempt"], one["step"]) for one in starts] == [(0, 0), (1, first.steps)]
    goodput = Run(run_dir).goodput()
    assert goodput.lost_steps == 0
    assert "lost" not in goodput.badput_s
    both = first.goodput.productive_s + second.goodput.productive_s
    assert goodput.total.productive_s == pytest.approx(both)


def test_a_killed_run_is_accounted_for_to_the_second(tokens, tmp_path):
    run_dir, token_file = tmp_path / "run", tmp_path / "tokens.npy"
    np.save(token_file, tokens)
    environment = {
        **os.environ,
        "XLA_FLAGS": os.environ["XLA_FLAGS"].replace("count=8", "count=1"),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    }

    def start(steps):
        command = [sys.executable, str(WORKER), str(run_dir), str(token_file), str(steps)]
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    process = start(100_000)
    deadline = time.monotonic() + 180
    recorded = steps_file(run_dir, 0)
    while time.monotonic() < deadline and process.poll() is None:
        if recorded.is_file() and recorded.read_bytes().count(b"\n") > 20:
            break
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    killed = time.time()
    first, said = host_steps(run_dir), read_events(run_dir / "events.jsonl")
    last_sign = max(first[-1].time, said[-1].time)
    run = Run(run_dir)
    assert run.summary(now=killed + 3600).state == "silent"
    time.sleep(1.0)
    saved = max(event.data["step"] for event in said if event.event == "saved")
    process = start(saved + 30)
    process.communicate(timeout=180)
    ended = time.time()
    assert process.returncode == 0
    events = run.events()
    starts = [event for event in events if event.event == "attempt started"]
    (end,) = [event for event in events if event.data.get("reason") == "killed"]
    assert [event.data["attempt"] for event in starts] == [0, 1]
    assert (end.data["step"], end.data["seen_by"]) == (first[-1].step, 1)
    resumed = starts[1].data["step"]
    goodput = run.goodput()
    assert goodput.lost_steps == first[-1].step - resumed
    lost = sum(s.step_time_s - s.input_stall_s for s in first if s.step > resumed)
    assert goodput.badput_s["lost"] == pytest.approx(lost, rel=0.02, abs=0.02)
    assert goodput.badput_s["restart"] == pytest.approx(starts[1].time - last_sign, abs=0.01)
    assert goodput.badput_s["restart"] >= 1.0
    kept = sum(
        s.step_time_s - s.input_stall_s
        for s in host_steps(run_dir)
        if s.time > starts[1].time or s.step <= resumed
    )
    assert goodput.total.productive_s == pytest.approx(kept, rel=0.02, abs=0.02)
    parts = goodput.total.productive_s + sum(goodput.badput_s.values())
    assert goodput.total.wall_s == pytest.approx(parts)
    assert goodput.total.wall_s <= ended - starts[0].time + 0.1
    assert goodput.total.wall_s >= events[-1].time - starts[0].time - 0.1
    assert json.loads(json.dumps(goodput.to_dict()))["attempts"] == 2

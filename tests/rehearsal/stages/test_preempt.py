"""Pods are taken away once with a notice, once without; a run that escapes is a failure."""

from types import SimpleNamespace

import pytest
from sample_rehearsal import JOB, attempt, launched

from tpukit.hardware.figure import Figure
from tpukit.pods.causes import Cause
from tpukit.pods.providers.protocol import StepCompleted
from tpukit.rehearsal.stage import Scene
from tpukit.rehearsal.stages import preempt as stage
from tpukit.rehearsal.stages.launch import CalmRun
from tpukit.rehearsal.stand_in import StandIn

JOB_60 = JOB.replace({"train.steps": 60, "train.checkpoint_every": 10})


@pytest.fixture
def scene():
    taken = []
    cloud = SimpleNamespace(
        preempt=lambda pod, notice_s: taken.append((pod, notice_s)) or True,
        leftovers=[],
        taken=taken,
    )
    made = Scene(JOB, StandIn(JOB_60, True, ()), None, cloud)
    calm = launched("undisturbed", [attempt(1, (1, 60), Cause.DONE)])
    made.findings.append(CalmRun(calm, None, Figure.missing("nats", "none"), "a cloud"))
    return made


def play_steps(monkeypatch, causes):
    """Let a launch be all steps in a row, ending as given."""

    def launch_here(scene, name, *, on_step):
        for step in range(1, 61):
            on_step(StepCompleted("host", step, 1.0))
        attempts = [attempt(number, (1, 60), cause) for number, cause in enumerate(causes, 1)]
        return launched(name, attempts)

    monkeypatch.setattr(stage, "launch_here", launch_here)


def test_it_is_taken_away_twice(scene, monkeypatch):
    play_steps(monkeypatch, [Cause.SPOT, Cause.SPOT, Cause.DONE])
    found = stage.PreemptStage().run(scene)
    assert scene.cloud.taken == [("preempted-a1", stage.NOTICE_S), ("preempted-a2", 0.0)]
    assert [one.kind for one in scene.moments] == ["preempted", "preempted"]
    assert found.is_good
    assert (found.predicted.noticed, found.predicted.killed) == (1, 1)


def test_the_second_time_is_off_a_save(scene, monkeypatch):
    play_steps(monkeypatch, [Cause.SPOT, Cause.SPOT, Cause.DONE])
    stage.PreemptStage().run(scene)
    step = int(scene.moments[1].text.rsplit(" ", 1)[1])
    assert step % JOB_60.train.checkpoint_every


def test_a_run_that_was_over_first_is_no_rehearsal(scene, monkeypatch):
    play_steps(monkeypatch, [Cause.SPOT, Cause.DONE])
    with pytest.raises(stage.NotPreempted, match="after 1 of 2 preemptions"):
        stage.PreemptStage().run(scene)


def test_what_is_left_behind_is_a_failure(scene, monkeypatch):
    play_steps(monkeypatch, [Cause.SPOT, Cause.SPOT, Cause.DONE])
    scene.cloud.leftovers.append("preempted-a2")
    found = stage.PreemptStage().run(scene)
    assert not found.is_good
    assert "LEFT BEHIND: preempted-a2" in found.sentence

"""What is planned: the job's own tokens where it says how many, else twenty a parameter."""

from types import SimpleNamespace

import pytest

from tpukit.hardware.figure import Figure
from tpukit.job import Job
from tpukit.rehearsal.stage import LeftOut, Scene
from tpukit.rehearsal.stages import plan as stage

JOB = Job(model="tiny", on="v6e-4", batch_size=8, sequence_length=64)


@pytest.fixture
def asked(monkeypatch):
    calls = []

    def plan(config, **how):
        calls.append(how)
        best = SimpleNamespace(
            slice="v6e-4", usd=Figure(3.5, "USD", "model", "x"), days=2.0, step_time_s=0.25
        )
        return SimpleNamespace(
            model=config.name, tokens=how["tokens"], best=best, feasible=True, to_dict=dict
        )

    monkeypatch.setattr(stage, "plan", plan)
    return calls


def run(job):
    return stage.PlanStage().run(Scene(job, None, None, None))


def test_twenty_tokens_a_parameter(asked):
    found = run(JOB)
    assert [call["tokens"] for call in asked] == [20 * 115_008] * 2
    assert asked[0]["on"] == ["v6e-4"]
    assert "on" not in asked[1], "and anywhere"
    assert "cheapest on v6e-4, 3.5 USD and 2 days" in found.sentence


def test_as_many_as_its_steps_have(asked):
    run(JOB.replace({"train.steps": 1000, "train.optimizer": "lion"}))
    assert asked[0]["tokens"] == 1000 * 8 * 64
    assert asked[0]["optimizer"] == "lion"
    assert asked[0]["sequence_length"] == 64


def test_a_slice_that_is_too_small_is_said(asked, monkeypatch):
    inner = stage.plan

    def plan(config, **how):
        found = inner(config, **how)
        found.feasible = "on" not in how
        return found

    monkeypatch.setattr(stage, "plan", plan)
    found = run(JOB)
    assert found.there is None
    assert "it does not fit on v6e-4" in found.sentence


def test_a_model_of_ones_own_is_left_to_the_compiler(asked):
    with pytest.raises(LeftOut, match="only the compiler can judge"):
        run(Job(model="own.py:build", on="v6e-4"))
    assert not asked

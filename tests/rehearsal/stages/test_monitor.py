"""What watching shows, read from a run directory whose numbers are known."""

from types import SimpleNamespace

import pytest
from sample_rehearsal import attempt, launched
from sample_runs import make_run

from tpukit.observe.runs.run import Run
from tpukit.pods.causes import Cause
from tpukit.rehearsal.stage import Scene
from tpukit.rehearsal.stages.monitor import MonitorStage
from tpukit.rehearsal.stages.preempt import InterruptedRun, Preempt


@pytest.fixture
def scene(tmp_path):
    make_run(tmp_path / "run", steps=60, total_steps=60, ended="done")
    run = launched("preempted", [attempt(1, (1, 60), Cause.DONE)])
    run = SimpleNamespace(**{**vars(run), "folder": tmp_path / "run"})
    made = Scene(None, None, None, None)
    model = InterruptedRun(
        steps=60, step_s=1, ready_s=1, start_s=1, save_s=0, every=6, noticed=1, killed=1
    )
    made.findings.append(Preempt(run, model, ()))
    return made


def test_it_says_what_the_run_says(scene):
    found = MonitorStage().run(scene)
    run = Run(scene.findings[0].run.folder)
    assert found.goodput.to_dict() == run.goodput().to_dict()
    assert found.hosts == len(run.processes()) == 4
    assert f"goodput {run.goodput().share:.1%}" in found.sentence


def test_a_run_that_nobody_read_is_not_watched(scene):
    for file in scene.findings[0].run.folder.glob("hosts/*/readings.jsonl"):
        file.unlink()
    found = MonitorStage().run(scene)
    assert not found.is_good
    assert "no reading of the host" in found.sentence

"""A run on the emulated cloud as a rehearsal follows it: what is said, and what ends it."""

from types import SimpleNamespace

import pytest
from sample_rehearsal import JOB, attempt

from tpukit.job import Job
from tpukit.pods.causes import Cause, Ending
from tpukit.pods.providers.protocol import Line, StepCompleted
from tpukit.pods.supervision.journal import AttemptBegan
from tpukit.pods.supervision.supervisor import Outcome
from tpukit.rehearsal.stage import Scene
from tpukit.rehearsal.stages import launch as launched
from tpukit.rehearsal.stand_in import StandIn


@pytest.fixture
def scene(tmp_path):
    said = []
    cloud = SimpleNamespace(
        launch_section=lambda slice: {"provider": "gcp", "project": "emulated"}, store=None
    )
    job = Job.from_dict({**JOB.to_dict(), "launch": {"include": ["helpers"], "spot": False}})
    made = Scene(job, StandIn(JOB, True, ()), tmp_path, cloud, said.append)
    made.said = said
    return made


def launch(scene, monkeypatch, events, ending):
    """Launch with a supervisor that tells these events; return the job it was given."""
    asked = []

    def prepare_launch(job, *, name, state, progress):
        def run(tell):
            for event in events:
                tell(event)
            last = attempt(1, (1, 2), ending.cause)
            return Outcome(job=name, ending=ending, reason="over", attempts=(last,), losses=())

        asked.append(job)
        return SimpleNamespace(run=run, job=job)

    monkeypatch.setattr(launched, "prepare_launch", prepare_launch)
    steps = []
    with pytest.raises(launched.RunFailed) as failed:
        launched.launch_here(scene, "calm", on_step=steps.append)
    return asked[0], steps, str(failed.value)


def test_a_run_that_fails_is_told_with_its_last_words(scene, monkeypatch):
    events = [
        AttemptBegan(attempt(1, (1, 2), Cause.DONE)),
        Line("host", "reading weights"),
        *(StepCompleted("host", step, 5.0) for step in range(1, 22)),
        Line("host", "error: no such file"),
    ]
    ending = Ending(Cause.BAD_INPUT, host="host")
    job, steps, told = launch(scene, monkeypatch, events, ending)
    assert "reading weights / error: no such file" in told
    assert [event.step for event in steps] == list(range(1, 22))
    shown = [line for line in scene.said if line.startswith("step")]
    assert shown == ["step 1 of 6, loss 5.0000", "step 20 of 6, loss 5.0000"]
    assert [moment.kind for moment in scene.moments] == ["attempt"]
    assert job.train.run_dir == str(scene.folder / "calm")


def test_only_the_files_that_a_job_needs_are_taken_from_its_launch(scene, monkeypatch):
    job, _, _ = launch(scene, monkeypatch, [], Ending(Cause.BAD_INPUT))
    assert job.launch.include == ("helpers",)
    assert job.launch.project == "emulated"
    assert "spot" not in job.launch.model_fields_set

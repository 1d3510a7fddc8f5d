"""One that does not fit, and the first fix that a compile proves."""

from types import SimpleNamespace

import pytest

from tpukit.checker.fix import Fix, FixList
from tpukit.errors import XLACompilationError
from tpukit.hardware import Slice
from tpukit.job import Job
from tpukit.rehearsal.stage import Scene
from tpukit.rehearsal.stages import check as stage
from tpukit.rehearsal.stand_in import StandIn

GIB = 1 << 30
JOB = Job(model="tiny", on="v6e-4", batch_size=8, sequence_length=64)


class Compiler:
    """Says what a job takes: a GiB for each example in a piece, and half as much otherwise."""

    def __init__(self, usable=32 * GIB):
        self.usable, self.asked, self.is_slow = usable, [], False

    def __call__(self, job, *, memory_only=False, timeout_s=None, progress=None):
        self.asked.append((job, memory_only))
        if timeout_s is not None and self.is_slow:
            raise XLACompilationError(f"killed after {timeout_s:g} s")
        total = job.examples * GIB // job.microbatches + GIB // 2
        fits = total <= self.usable
        fixes = FixList(
            (
                Fix(changes={"microbatches": 2}, cost="", estimate_bytes=1, usable_bytes=2),
                Fix(changes={"microbatches": 4}, cost="", estimate_bytes=1, usable_bytes=2),
                Fix(changes={"batch_size": 4}, cost="", estimate_bytes=3, usable_bytes=2),
            )
        )
        memory = SimpleNamespace(
            total_bytes=total,
            usable_bytes=self.usable,
            purposes={"activations": job.examples * GIB // job.microbatches},
            slice=Slice.parse("v6e-4"),
        )
        prediction = None if memory_only or not fits else SimpleNamespace(step_time_s=0.5)
        return SimpleNamespace(
            fits=fits,
            memory=memory,
            prediction=prediction,
            fixes=None if fits else fixes,
            job=job,
            to_dict=dict,
        )


@pytest.fixture
def compiler(monkeypatch):
    made = Compiler()
    monkeypatch.setattr(stage, "check", made)
    return made


def run(job):
    said = []
    scene = Scene(job, StandIn(JOB, True, ()), None, None, said.append)
    return stage.CheckStage().run(scene), said


def test_a_job_that_fits_is_grown_until_it_does_not(compiler):
    found, _ = run(JOB)
    assert found.is_good
    assert found.whole.job is JOB
    refused = found.refused
    assert refused.memory.total_bytes > compiler.usable
    assert refused.job.examples in (32, 64)
    assert refused.fixed.fits
    assert refused.fix.changes == {"microbatches": 2}
    assert "microbatches: 2 makes it" in found.sentence


def test_of_a_job_that_does_not_fit_the_first_proved_fix_is_taken(compiler):
    found, said = run(JOB.replace(batch_size=96))
    assert found.refused.job.examples == 96
    assert found.refused.fix.changes == {"microbatches": 4}, "two pieces are still too large"
    assert found.whole is found.refused.fixed
    assert found.is_good
    assert found.whole.prediction is not None, "the job goes on with its fix"
    assert "would microbatches: 2 make it fit?" in said


def test_no_fix_is_claimed_that_no_compile_proved(compiler):
    found, _ = run(JOB.replace(batch_size=1024))
    assert found.refused.fix is None
    assert not found.is_good
    assert "no proposed fix was proved" in found.sentence


def test_a_limit_that_takes_the_compiler_too_long_is_not_claimed(compiler):
    compiler.is_slow = True
    found, _ = run(JOB)
    assert found.refused is None
    assert found.is_good, "the job itself fits"
    assert "its limit is not known: killed after 90 s" in found.sentence


def test_what_runs_here_is_checked_too(compiler):
    run(JOB.replace(batch_size=96))
    job, memory_only = compiler.asked[-1]
    assert job is JOB
    assert not memory_only


@pytest.mark.parametrize(
    ("moving", "times"), [(20 * GIB, 2), (8 * GIB, 4), (GIB, 32), (0, 1 << 14)]
)
def test_a_batch_grows_past_the_limit(moving, times):
    report = SimpleNamespace(
        purposes={"activations": moving}, usable_bytes=32 * GIB, total_bytes=GIB
    )
    assert stage.times_too_many(report) == times

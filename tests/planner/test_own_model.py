"""Planning somebody's own model: the compiler is asked about one slice after another."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from flax import linen

from tpukit.errors import ConfigError, XLACompilationError
from tpukit.planner.planning import plan
from tpukit.planner.search.verification import OwnModelSearch

GIB = 2**30
BUILDER = """
import jax, jax.numpy as jnp
from tpukit import Workload

def init(rng):
    return {"w": jax.random.normal(rng, (256, 256))}

def apply(params, batch):
    return batch["inputs"] @ params["w"]

def loss(outputs, batch):
    return jnp.mean((outputs - batch["targets"]) ** 2)

def build():
    rows = jax.ShapeDtypeStruct((64, 256), jnp.float32)
    shapes = {"inputs": rows, "targets": rows}
    return Workload((init, apply), batch=shapes, loss=loss)
"""


@pytest.fixture
def ask(tmp_path, monkeypatch):
    """What `plan` would search for the builder above, once it knows that it is nobody's preset."""
    (tmp_path / "regression.py").write_text(BUILDER)
    monkeypatch.chdir(tmp_path)
    taken = {}

    def choices(self):
        taken["ask"] = self.ask
        return [], "a test took the ask"

    monkeypatch.setattr(OwnModelSearch, "choices", choices)

    def of(model="regression.py:build", **asked):
        plan(model, tokens=1e6, on="v6e", max_chips=32, **asked)
        monkeypatch.undo()
        monkeypatch.chdir(tmp_path)
        return taken["ask"]

    return of


def compiled(job, *, fits=True):
    prediction = SimpleNamespace(
        step_time_s=1.0 / job.slice.chips,
        seconds_by_cause={"matrix": 0.5, "kernel": 0.2, "overhead": 0.3},
        caveats=(),
    )
    memory = SimpleNamespace(
        total_bytes=3 * GIB,
        usable_bytes=31 * GIB,
        host_bytes=0,
        purposes={"parameters": GIB, "optimizer state": GIB, "gaps": GIB},
        verdict="too large",
    )
    facts = SimpleNamespace(argument_bytes=())  # as of a compile that did not keep them
    return SimpleNamespace(
        memory=memory, fits=fits, facts=facts, slice=None, predict=lambda **_: prediction
    )


def searched(ask, judge, *, seconds=60.0):
    def compile_jobs(jobs, *, timeout_s, progress):
        return [judge(job) for job in jobs]

    search = OwnModelSearch(ask, seconds, lambda line: None, compile=compile_jobs)
    return search, *search.choices()


def ask_with(ask, **limits):
    return replace(ask, limits=replace(ask.limits, **limits))


def test_every_slice_its_batch_can_be_split_over_is_asked_about(ask):
    search, found, shortfall = searched(ask(objective="fastest"), compiled)
    assert not shortfall
    assert [str(choice.slice) for choice in found] == [
        *("v6e-32", "v6e-16", "v6e-8", "v6e-4", "v6e-1")
    ]
    best = found[0]
    assert best.hbm.origin == "compiler"
    assert best.memory["weights"] == best.memory["optimizer"] == best.memory["temporaries"] == GIB
    assert best.seconds_by_cause["attention"] == 0.2
    steps = best.job.train.steps
    assert steps == -(-1_000_000 // 64)
    assert best.days == pytest.approx(steps / 32 / 86_400)
    assert best.job.examples == 64
    assert search.compiled == 5


def test_a_bare_model_is_asked_about_too(ask):
    own = linen.Sequential([linen.Embed(64, 16), linen.Dense(64)])
    taken = ask(own, sequence_length=32)
    assert (taken.subject.name, taken.subject.remat) == ("Sequential", "none")
    _, found, _ = searched(taken, compiled)
    assert found[0].job.model is own
    assert found[0].job.tokens_per_example == 32
    assert {choice.batch_size for choice in found} == {1, 4, 8, 16, 32}  # one example a device


def test_what_does_not_fit_or_is_refused_is_told(ask):
    def judge(job):
        if job.slice.chips > 8:
            return XLACompilationError("no such program")
        return compiled(job, fits=job.slice.chips > 4)

    search, found, _ = searched(ask(), judge)
    assert [str(choice.slice) for choice in found] == ["v6e-8"]
    assert sum("too large" in note for note in search.notes) == 2
    assert sum("no such program" in note for note in search.notes) == 2


def test_limits_and_time(ask):
    asked = ask(deadline="1h")
    _, found, shortfall = searched(asked, compiled)
    assert {choice.slice.chips for choice in found} == {8, 16, 32}  # 15,625 steps of 1/chips s
    assert not shortfall
    _, nearest, shortfall = searched(ask_with(asked, deadline_days=1e-6), compiled)
    assert len(nearest) == 5
    assert "every slice that holds it breaks a limit" in shortfall
    _, nothing, why = searched(asked, lambda job: compiled(job, fits=False))
    assert (nothing, why) == ([], "no slice that its batch can be split over holds it")
    search, _, _ = searched(asked, compiled, seconds=0.0)
    assert search.compiled == 0
    assert "5 slices were not asked about" in search.notes[0]


def test_without_the_compiler_there_is_nothing_to_say(ask):
    ask()
    with pytest.raises(ConfigError, match="leave verification on"):
        plan("regression.py:build", tokens=1e6, on="v6e", verify=0)

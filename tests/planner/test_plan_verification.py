"""The compiler's word: what it refuses is replaced, what it learns is used, time is kept."""

from functools import cache
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpukit.errors import TPUNotAvailableError, XLACompilationError
from tpukit.planner.planning import _answer, plan
from tpukit.planner.search.search import Search
from tpukit.planner.search.verification import Verifier

GIB = 2**30


def searched(**asked):
    found = plan("llama3.1-8b", tokens=1e10, on="v6e", max_chips=64, verify=0, **asked)
    return Search.run(found.ask)


def compiled(*, total_bytes=10 * GIB, fits=True, step_time_s=1.0):
    prediction = SimpleNamespace(step_time_s=step_time_s, caveats=())
    return SimpleNamespace(
        facts=SimpleNamespace(argument_bytes=()),
        slice=None,
        memory=SimpleNamespace(total_bytes=total_bytes),
        fits=fits,
        predict=lambda **_: prediction,
    )


def answered(search, judge, *, seconds=60.0, top=3, verify=2):
    """The answer when `judge(job)` is the compiler; and the jobs it was asked about."""
    asked = []

    def compile_jobs(jobs, *, timeout_s, progress):
        assert 0 < timeout_s <= seconds
        asked.extend(jobs)
        return [judge(job) for job in jobs]

    verifier = Verifier(seconds, lambda line: None, compile=compile_jobs)
    return _answer(search, top=top, verify=verify, verifier=verifier), asked


def test_what_the_compiler_confirms_carries_its_figures():
    search = searched()
    found, asked = answered(search, lambda job: compiled(total_bytes=12 * GIB, step_time_s=7.0))
    first = found.best
    assert len(asked) == 2
    assert first.verified.memory_bytes == first.memory_bytes == 12 * GIB
    assert first.hbm.origin == "compiler"
    assert first.step_time_s == 7.0
    steps = first.job.train.steps
    assert first.days == pytest.approx(steps * 7.0 / 86_400)
    assert first.usd.value == pytest.approx(first.chip_hours * first.usd_per_chip_hour.value)
    assert found.choices[2].verified is None
    assert any("by the compiled schedule" in note for note in found.disagreements)


def test_one_that_does_not_fit_makes_room_for_the_next_of_its_slice():
    search = searched()
    refused = []

    def judge(job):
        if "offload" in job.remat or not refused:
            refused.append(job)
            return compiled(total_bytes=40 * GIB, fits=False)
        return compiled()

    found, asked = answered(search, judge, verify=1, top=1)
    assert found.feasible
    assert found.best.job not in refused
    assert found.best.slice == refused[0].slice
    assert len(asked) < 12  # what was learnt spares the compiler the like of what failed
    assert any("which does not fit" in note for note in found.disagreements)


def test_a_refusal_is_told_with_its_reason():
    search = searched()

    def judge(job):
        return XLACompilationError("no such layout") if job.slice.chips > 8 else compiled()

    found, _ = answered(search, judge, verify=1, top=1)
    assert found.best.slice.chips <= 8
    assert any("no such layout" in note for note in found.disagreements)


def test_choices_are_ranked_again_by_what_the_compiler_says():
    search = searched()
    slow = []

    def judge(job):
        slow.append(job.on)
        return compiled(step_time_s=100.0 if job.on == slow[0] else 0.5)

    found, _ = answered(search, judge)
    assert str(found.best.slice) != slow[0]
    assert found.choices[0].usd.value <= found.choices[1].usd.value


def test_another_mesh_that_comes_close_is_compiled_too_and_the_faster_stands():
    asked = {"tokens": 1e12, "on": "2xv6e-256", "objective": "fastest", "verify": 0}
    search = Search.run(plan("llama3.1-405b", sequence_length=8192, **asked).ask)
    preferred = search.choice(next(search.best_of_each_slice(search.order()))).mesh

    def judge(job):
        return compiled(step_time_s=60.0 if job.mesh_sizes == preferred else 40.0)

    found, jobs = answered(search, judge, verify=1, top=1)
    assert len(jobs) == 2
    assert found.best.mesh != preferred
    assert found.best.step_time_s == 40.0
    assert any("the model prefers" in note for note in found.disagreements)
    slower, _ = answered(search, lambda job: compiled(), verify=1, top=1)
    assert slower.best.mesh == preferred  # no faster: what the model prefers stands


def test_a_schedule_that_breaks_the_deadline_is_no_answer():
    search = searched(deadline="10d")
    found, _ = answered(search, lambda job: compiled(step_time_s=1e4), top=2)
    assert not found.feasible
    assert "when compiled" in found.shortfall
    assert found.choices  # the nearest there is
    assert any("days, 10 days asked" in note for note in found.disagreements)


def test_no_compile_starts_when_time_is_up():
    found, asked = answered(searched(), lambda job: compiled(), seconds=0.0)
    assert not asked
    assert "0 s were used up" in found.best.verified.reason
    assert found.best.hbm.origin == "model"


def test_without_libtpu_the_way_out_is_named():
    with pytest.raises(TPUNotAvailableError, match="extra"):
        answered(searched(), lambda job: TPUNotAvailableError("needs an extra"))


@cache
def weighed(objective, spot):
    """A search, and what the model says of the steps that its best layouts have."""
    asked = {"tokens": 1e11, "on": "v6e,v5e", "max_chips": 512, "verify": 0}
    search = Search.run(plan("llama3.1-8b", objective=objective, spot=spot, **asked).ask)
    order = search.order()
    firsts = list(search.best_of_each_slice(order))
    rivals = [index for index in (search.rival(order, first) for first in firsts[:3]) if index]
    choices = [search.choice(index) for index in (*firsts, *rivals)]
    return search, {str(choice.job.to_dict()): choice.modelled_step_s for choice in choices}


@settings(max_examples=15, deadline=None)
@given(
    ratios=st.lists(st.floats(0.6, 1.8), min_size=3, max_size=3),
    objective=st.sampled_from(["cheapest", "fastest"]),
    spot=st.booleans(),
)
def test_a_verified_plan_has_one_set_of_figures(ratios, objective, spot):
    search, modelled = weighed(objective, spot)
    taken = {}

    def judge(job):
        ratio = taken.setdefault(job.on, ratios[len(taken) % 3])
        return compiled(step_time_s=ratio * modelled[str(job.to_dict())])

    found, _ = answered(search, judge, top=5, verify=3)
    confirmed = [choice for choice in found.choices if choice.verified is not None]
    assert len(confirmed) == 3
    own = [taken[str(choice.slice)] for choice in confirmed]
    for choice in (*found.choices, *found.front):
        compiled_too = choice in confirmed
        ratio = taken[str(choice.slice)] if compiled_too else sorted(own)[1]
        assert choice.step_time_s == pytest.approx(ratio * choice.modelled_step_s)
        assert (choice.verified is not None) == compiled_too
    value = (lambda one: one.usd.value) if objective == "cheapest" else (lambda one: one.days)
    excess = value(found.best) / min(map(value, (*found.choices, *found.front)))
    notes = [] if excess <= 1 + 1e-9 else ["within 1 %" if excess <= 1.01 else "of those compiled"]
    assert found.headline == objective.upper() + "".join(f" ({note})" for note in notes)
    by_slice = {choice.slice: choice for choice in found.choices}
    for one in found.front:
        assert by_slice.get(one.slice, one) == one, "two figures for one slice"
        for other in found.front:
            assert not (other.days < one.days and other.usd.value < one.usd.value)
    assert found.best in found.front
    assert found.best in confirmed
    if spot:
        every = found.best.job.train.checkpoint_every
        interval = found.best.checkpoint_interval_s
        assert every == max(1, round(interval / found.best.step_time_s))


def test_a_slice_that_the_compiler_left_nothing_of_is_not_on_the_front():
    search = searched()
    first = str(search.slice(next(search.best_of_each_slice(search.order()))))

    def judge(job):
        return XLACompilationError("no such layout") if job.on == first else compiled()

    found, _ = answered(search, judge)
    assert first not in {str(one.slice) for one in (*found.choices, *found.front)}

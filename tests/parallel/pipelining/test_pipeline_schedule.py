"""Pipeline schedules: the table respects every dependency and the idle time is counted in it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpukit.errors import TPUValidationError
from tpukit.parallel.pipelining.schedule import PipelineSchedule

sizes = {"stages": st.integers(1, 6), "microbatches": st.integers(1, 9)}
names = st.sampled_from(["gpipe", "1f1b"])


@given(name=names, **sizes)
def test_every_microbatch_goes_forward_and_back_in_order(name, stages, microbatches):
    schedule = PipelineSchedule(name, stages, microbatches)
    when = {}
    for slot, works in enumerate(schedule.table):
        kinds = {work.kind for work in works if work}
        assert len(kinds) <= 1  # one program: a slot is forward for all stages or backward for all
        for stage, work in enumerate(works):
            if work:
                assert (*work, stage) not in when
                when[(*work, stage)] = slot
    assert len(when) == 2 * stages * microbatches
    for microbatch in range(microbatches):
        for stage in range(1, stages):
            assert when["F", microbatch, stage] > when["F", microbatch, stage - 1]
            assert when["B", microbatch, stage - 1] > when["B", microbatch, stage]
        assert when["B", microbatch, stages - 1] > when["F", microbatch, stages - 1]


@given(name=names, **sizes)
def test_the_bubble_counted_in_the_table_is_the_published_one(name, stages, microbatches):
    schedule = PipelineSchedule(name, stages, microbatches)
    expected = (stages - 1) / (microbatches + stages - 1)
    assert schedule.bubble_fraction == pytest.approx(expected)


@given(**sizes)
def test_1f1b_holds_a_number_of_inputs_that_does_not_grow(stages, microbatches):
    assert PipelineSchedule("gpipe", stages, microbatches).buffers == microbatches
    held = PipelineSchedule("1f1b", stages, microbatches).in_flight
    assert held == tuple(min(microbatches, 2 * (stages - 1 - stage) + 1) for stage in range(stages))


def test_it_can_be_looked_at():
    schedule = PipelineSchedule("1f1b", 3, 4)
    assert schedule.draw().splitlines() == [
        "stage 0  F0 F1 F2 ·  F3 ·  ·  B0 ·  B1 B2 B3",
        "stage 1  ·  F0 F1 ·  F2 B0 F3 B1 ·  B2 B3 ·",
        "stage 2  ·  ·  F0 B0 F1 B1 F2 B2 F3 B3 ·  ·",
    ]
    figures = schedule.to_dict()
    assert figures["slots"] == 12
    assert figures["bubble_fraction"] == pytest.approx(1 / 3)
    assert figures["table"][0] == ["F0", None, None]
    summary = schedule.__rich__().renderables[0].plain
    assert "33.3% of the time idle (model), 4 micro-batch inputs held" in summary


def test_errors_name_what_would_work():
    with pytest.raises(TPUValidationError, match=r"'1f1' is unknown; known are gpipe, 1f1b. Did"):
        PipelineSchedule("1f1", 2, 4)
    with pytest.raises(TPUValidationError, match=r"0 micro-batches has nothing to do"):
        PipelineSchedule("gpipe", 2, 0)

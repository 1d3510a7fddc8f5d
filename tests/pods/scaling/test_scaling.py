"""Sizes of a job: never outside the bounds, always a legal slice, no to and fro."""

import asyncio
import io
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from tpukit.errors import ConfigError, TPUValidationError
from tpukit.hardware import Figure, Slice, list_slices
from tpukit.pods import AutoScaler, PodConfig, ScalingPolicy, WorkloadMetrics
from tpukit.pods.scaling.metrics import MOST_SLICES, cores_of, measure


def measured(value, unit=""):
    return Figure(value, unit, "measured", "a test")


def metrics(on="v6e-16", *, step_s=1.0, used=0.95, goodput=0.99, age_s=1e6, left=None):
    return WorkloadMetrics(
        config=PodConfig(tpu_type=on),
        step_s=measured(step_s, "s"),
        utilization=measured(used),
        goodput=measured(goodput),
        age_s=age_s,
        remaining_steps=left,
    )


def scaler(**changes):
    return replace(AutoScaler(), **changes).build()


def on_slice(work_s, wait_s, on):
    """A job that computes `work_s` core-seconds a step and waits `wait_s`, on any slice."""
    step_s = work_s / cores_of(Slice.parse(on)) + wait_s
    return metrics(on, step_s=step_s, used=(step_s - wait_s) / step_s)


def test_policies_are_read_in_every_spelling():
    assert ScalingPolicy("PerformanceBased") is ScalingPolicy.PerformanceBased
    assert AutoScaler().with_policy("cost-based").policy is ScalingPolicy.COST_BASED


def test_a_busy_job_gets_the_largest_slice_that_stays_busy():
    decision = scaler(max_cores=256).evaluate_scaling(metrics("v6e-8", used=0.99))
    assert decision
    chosen = decision.config.slice
    # By hand: 0.94 s of computing on 8 cores and 0.06 s of waiting (5 % is doubt) stay above 0.85
    # up to 22 cores.
    assert str(chosen) == "v6e-16"
    assert "99% of v6e-8 in use (target 85%)" in decision.reason


def test_a_waiting_job_gives_cores_back():
    decision = scaler().evaluate_scaling(metrics("v6e-64", used=0.4))
    assert cores_of(decision.config.slice) < 64


def test_near_the_target_nothing_happens():
    decision = scaler().evaluate_scaling(metrics(used=0.88))
    assert not decision
    assert decision.config is None
    assert "the target of 85%" in decision.reason


GENERATIONS = ("v2", "v3", "v4", "v5e", "v5p", "v6e")


@st.composite
def scalers(draw):
    low = draw(st.integers(1, 512))
    return scaler(
        policy=draw(st.sampled_from([ScalingPolicy.PERFORMANCE_BASED, ScalingPolicy.COST_BASED])),
        min_cores=low,
        max_cores=draw(st.integers(low, 4096)),
        target_utilization=draw(st.floats(0.05, 0.9)),
        deadline_s=draw(st.none() | st.floats(1.0, 1e6)),
    )


@settings(max_examples=150, deadline=None)
@given(
    scaler=scalers(),
    generation=st.sampled_from(GENERATIONS),
    pick=st.integers(0, 30),
    step_s=st.floats(1e-3, 1e3),
    used=st.floats(0.0, 1.0),
    left=st.none() | st.integers(1, 10**6),
)
def test_every_decision_is_a_legal_slice_within_the_bounds(
    scaler, generation, pick, step_s, used, left
):
    slices = list_slices(generation)
    now = metrics(str(slices[pick % len(slices)]), step_s=step_s, used=used, left=left)
    try:
        decision = scaler.evaluate_scaling(now)
    except ConfigError:  # no slice has a number of cores between the bounds
        return
    assert decision.reason
    if decision:
        chosen = decision.config.slice
        assert scaler.min_cores <= cores_of(chosen) <= scaler.max_cores
        assert chosen in list_slices(generation)
        assert chosen != now.config.slice


@settings(max_examples=150, deadline=None)
@given(
    scaler=scalers(),
    generation=st.sampled_from(GENERATIONS),
    pick=st.integers(0, 30),
    work_s=st.floats(1e-2, 1e4),
    wait_s=st.floats(0.0, 10.0),
)
def test_a_constant_load_settles_without_to_and_fro(scaler, generation, pick, work_s, wait_s):
    slices = list_slices(generation)
    on = str(slices[pick % len(slices)])
    sizes = []
    try:
        for _ in range(12):
            decision = scaler.evaluate_scaling(on_slice(work_s, wait_s, on))
            if not decision:
                break
            on = str(decision.config.slice)
            sizes.append(cores_of(decision.config.slice))
    except ConfigError:
        return
    assert not decision  # it came to rest
    assert sizes in (sorted(sizes), sorted(sizes, reverse=True))


@settings(max_examples=60, deadline=None)
@given(
    work_s=st.floats(1.0, 1e3),
    wait_s=st.floats(0.01, 1.0),
    noise=st.lists(st.floats(-0.05, 0.05), min_size=30, max_size=30),
)
def test_noise_within_the_hysteresis_makes_no_to_and_fro(work_s, wait_s, noise):
    scale, on, sizes = scaler(max_cores=256), "v6e-16", []
    for error in noise:
        seen = on_slice(work_s, wait_s, on)
        used = min(1.0, max(0.0, seen.utilization.value + error))
        decision = scale.evaluate_scaling(replace(seen, utilization=measured(used)))
        if decision:
            on = str(decision.config.slice)
            sizes.append(cores_of(decision.config.slice))
    assert sizes in (sorted(sizes), sorted(sizes, reverse=True))


def test_a_young_pod_is_left_alone():
    decision = scaler().evaluate_scaling(metrics("v6e-8", used=0.99, age_s=60))
    assert not decision
    assert "has run for 60 s" in decision.reason


def test_low_goodput_is_a_veto():
    decision = scaler().evaluate_scaling(metrics("v6e-8", used=0.99, goodput=0.2))
    assert not decision
    assert "only 20% of the time is productive" in decision.reason


def test_a_change_that_does_not_pay_is_vetoed():
    decision = scaler(resize_s=700.0).evaluate_scaling(metrics("v6e-8", used=0.99, left=100))
    assert not decision
    assert "would not recover that" in decision.reason
    assert scaler(resize_s=1.0).evaluate_scaling(metrics("v6e-8", used=0.99, left=100))


def test_bounds_hold_at_once():
    decision = scaler(min_cores=32, max_cores=64).evaluate_scaling(metrics("v6e-8", age_s=0))
    assert 32 <= cores_of(decision.config.slice) <= 64


def test_impossible_bounds_name_the_possible():
    with pytest.raises(ConfigError, match=r"No v6e slice has 5 to 7 cores; sizes are 1, 4, 8"):
        scaler(min_cores=5, max_cores=7).evaluate_scaling(metrics())


def test_the_cheapest_size_in_time_is_chosen():
    cost = scaler(policy=ScalingPolicy.COST_BASED, min_cores=8, max_cores=256)
    assert str(cost.evaluate_scaling(metrics("v6e-64", used=0.5)).config.slice) == "v6e-8"
    # 32 core-seconds of computing and 0.5 s of waiting a step; 1000 steps in 900 s: 80 cores.
    in_time = replace(cost, deadline_s=900.0)
    decision = in_time.evaluate_scaling(metrics("v6e-64", used=0.5, left=1000))
    assert str(decision.config.slice) == "v6e-128"
    assert "too late with the present size" in decision.reason


def test_prices_that_are_not_known_leave_core_seconds():
    cost = scaler(policy=ScalingPolicy.COST_BASED)
    decision = cost.evaluate_scaling(metrics("tpu7x-4x4x4", used=0.5))
    assert "core-seconds" in decision.reason


def test_several_slices_become_more_or_fewer_of_the_same():
    decision = scaler(max_cores=512).evaluate_scaling(metrics("2xv6e-64", used=0.99))
    chosen = decision.config.slice
    assert chosen.chips_per_slice == 64
    assert chosen.num_slices > 2
    without_end = scaler().evaluate_scaling(metrics("2xv6e-1", used=0.99))
    assert len(without_end.sizes) == MOST_SLICES


@pytest.mark.parametrize(
    ("when", "cores"),
    [
        (datetime(2026, 11, 16, 9, 0), 64),  # a Monday morning
        (datetime(2026, 11, 14, 9, 0), 8),  # Saturday: nothing holds, the least
        (datetime(2026, 11, 15, 23, 30), 128),  # Sunday night
        (datetime(2026, 11, 16, 5, 59), 128),  # and its end
        (datetime(2026, 11, 16, 6, 0), 8),
    ],
)
def test_the_schedule_goes_by_the_clock(when, cores):
    clock = AutoScaler(min_cores=8, max_cores=256).with_schedule(
        {"mon-fri 08:00-20:00": 64, "sun 22:00-06:00": 128}
    )
    clock = replace(clock, now=lambda: when.replace(tzinfo=UTC).timestamp()).build()
    decision = clock.evaluate_scaling(metrics("v6e-16"))
    assert cores_of(decision.config.slice) == cores


@pytest.mark.parametrize("written", ["8-20", "mon 25:00-26:00", "xyz 08:00-09:00", "08:00-08:00"])
def test_hours_that_are_none_are_refused(written):
    with pytest.raises(ConfigError, match="names no hours"):
        AutoScaler().with_schedule({written: 8})


def test_contradictions_are_refused_when_built():
    with pytest.raises(ConfigError, match="swap them"):
        AutoScaler().with_min_cores(9).with_max_cores(8).build()
    with pytest.raises(ConfigError, match="add up to 1"):
        AutoScaler().with_target_utilization(0.99).build()
    with pytest.raises(ConfigError, match="needs hours"):
        AutoScaler().with_policy("schedule").build()


@pytest.mark.parametrize(
    "limits",
    [
        {"min_cores": 9, "max_cores": 8},
        {"min_cores": 0},
        {"max_cores": -8},
        {"min_cores": 8.5},
        {"target_utilization": 1.5},
        {"target_utilization": 0},
        {"hysteresis": -0.1},
        {"least_goodput": 2},
        {"resize_s": -1},
        {"policy": ScalingPolicy.SCHEDULE},
    ],
)
def test_limits_that_no_pod_can_meet_are_refused_in_keywords_too(limits):
    with pytest.raises(ConfigError, match="|".join(limits) + "|schedule"):
        AutoScaler(**limits)


def test_limits_given_one_after_the_other_are_checked_together():
    built = AutoScaler(min_cores=8, max_cores=16).with_min_cores(32).with_max_cores(64).build()
    assert (built.min_cores, built.max_cores) == (32, 64)


def test_it_can_be_awaited():
    async def main():
        return await scaler().evaluate_scaling(metrics("v6e-8", used=0.99))

    assert asyncio.run(main())


def test_a_decision_prints_itself():
    text = io.StringIO()
    decision = scaler(max_cores=64).evaluate_scaling(metrics("v6e-8", used=0.99))
    Console(file=text, width=120).print(decision)
    for part in ("v6e-8 → v6e-16", "measured", "model", "USD/step"):
        assert part in text.getvalue()
    assert decision.to_dict()["to"] == "v6e-16"


def test_steps_become_metrics():
    found = measure(
        PodConfig(tpu_type="v6e-8"),
        step_times_s=[1.0, 2.0, 1.0],
        stalled_s=[0.5, 0.5, 0.0],
        wall_s=8.0,
        steps=4,
        source="a test",
    )
    assert found.step_s.value == 1.0
    assert found.utilization.value == pytest.approx(0.75)
    assert found.goodput.value == pytest.approx(4 * 1.0 * 0.75 / 8)
    with pytest.raises(TPUValidationError, match="has no timed step"):
        measure(found.config, step_times_s=[], stalled_s=[], wall_s=0, steps=0, source="x")


def test_a_run_directory_is_read(tmp_path):
    lines = [
        f'{{"step": {n}, "step_time_s": 0.5, "input_stall_s": 0.1, "time": {1e9 + n}}}\n'
        for n in range(1, 11)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    config = PodConfig(tpu_type="v6e-8")
    found = WorkloadMetrics.from_current_training(tmp_path, config=config, remaining_steps=5)
    assert found.utilization.value == pytest.approx(0.8)
    assert found.remaining_steps == 5

    async def main():
        return await WorkloadMetrics.from_current_training(tmp_path, config=config)

    assert asyncio.run(main()).step_s.value == 0.5
    with pytest.raises(TPUValidationError, match="does not record its pod"):
        WorkloadMetrics.from_current_training(tmp_path)

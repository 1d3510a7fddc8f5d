"""One slow host among hosts that differ by noise: named with its cause, and nobody else ever."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from slow_hosts import Cluster

from tpukit.observe.readings import Reading, Sample
from tpukit.observe.runs import Run
from tpukit.observe.stragglers import HostRecords, detect_stragglers, find_stragglers
from tpukit.observe.stragglers.comparison import log_chance, stands_out
from tpukit.records.host_steps import HostSteps

CAUSES = {
    "input": ("input", 0.2),
    "checkpoint": ("checkpoint", 3.0),
    "host": ("host", 0.1),
    "link": ("link", 7.0),
    "dcn": ("link", 0.004),
    "throttle": ("chip", 4.0),
    "last": ("chip", 0.09),
    "weak": ("chip", 0.3),
    "idle": ("host", 0.4),
}


@pytest.mark.parametrize("hosts", [2, 3, 16])
@pytest.mark.parametrize("trouble", CAUSES)
def test_the_slow_host_is_named_with_its_cause(trouble, hosts):
    cause, amount = CAUSES[trouble]
    cluster = Cluster(hosts, noise=0.1, seed=hosts, slow={1: (trouble, amount)})
    report = detect_stragglers(cluster.records())
    assert [(one.host, one.process, one.cause) for one in report.found] == [("host-1", 1, cause)]
    assert "the others" in str(report)
    assert json.loads(json.dumps(report.to_dict()))["found"][0]["cause"] == cause


def test_a_slow_chip_is_seen_in_its_own_steps_where_they_do_not_end_together():
    cluster = Cluster(4, slow={3: ("chip", 0.2)}, synchronous=False)
    (found,) = detect_stragglers(cluster.records()).found
    assert (found.process, found.cause) == (3, "chip")
    assert found.share == pytest.approx(0.4, abs=0.1)


def test_what_the_others_wait_is_what_it_costs():
    cluster = Cluster(8, noise=0.05, slow={5: ("input", 0.5)})
    (found,) = detect_stragglers(cluster.records()).found
    slow, fast = (
        np.median([s.step_time_s for s in one.records()[0].steps])
        for one in (cluster, Cluster(8, noise=0.05))
    )
    assert found.share == pytest.approx((slow - fast) / slow, abs=0.03)


def test_two_slow_hosts_are_both_named():
    cluster = Cluster(8, slow={2: ("input", 0.2), 6: ("input", 0.2)})
    report = detect_stragglers(cluster.records())
    assert {(one.process, one.cause) for one in report.found} == {(2, "input"), (6, "input")}


def test_input_that_is_now_and_then_late_is_found():
    cluster = Cluster(8)
    cluster.steps[4] = [
        step
        if step.step % 8
        else type(step)(
            step.time, step.step, step.step_time_s, 0.5, 0.4, 0.0, step.dispatch_s, step.host
        )
        for step in cluster.steps[4]
    ]
    (found,) = detect_stragglers(cluster.records()).found
    assert (found.process, found.cause) == (4, "input")


def test_waiting_in_dispatch_does_not_make_fast_hosts_slow():
    """Where dispatch waits for the slow host, all but that one seem slow at it."""
    for hosts in (2, 3, 4):
        cluster = Cluster(hosts, slow={0: ("input", 0.3)})
        for process in range(1, hosts):
            cluster.steps[process] = [
                type(step)(step.time, step.step, step.step_time_s, 0.0, 0.0, 0.0, 0.3, step.host)
                for step in cluster.steps[process]
            ]
        found = detect_stragglers(cluster.records()).found
        assert [(one.process, one.cause) for one in found] == [(0, "input")]


@settings(max_examples=50, deadline=None)
@given(
    hosts=st.integers(2, 6),
    jitter=st.floats(0.01, 0.5),
    jitters=st.sampled_from([1.0, 0.1]),
    seed=st.integers(0, 10**6),
    slow=st.booleans(),
)
def test_steps_that_end_together_accuse_no_chip(hosts, jitter, jitters, seed, slow):
    """A host that hears late of a step's end has a long step, and a short one after it."""
    cluster = Cluster(hosts, slow={0: ("input", 0.3)} if slow else {})
    draw = np.random.default_rng(seed)
    for process, steps in cluster.steps.items():
        heard = jitter * draw.exponential(1, len(steps) + 1)
        heard *= draw.random(len(heard)) < jitters
        cluster.steps[process] = [
            replace(step, step_time_s=max(0.01, step.step_time_s * (1 + later - before)))
            for step, before, later in zip(steps, heard, heard[1:], strict=False)
        ]
    found = detect_stragglers(cluster.records()).found
    assert [(one.process, one.cause) for one in found] == ([(0, "input")] if slow else [])


@settings(max_examples=30, deadline=None)
@given(
    hosts=st.integers(2, 12),
    steps=st.integers(1, 200),
    noise=st.floats(0.0, 1.0),
    seed=st.integers(0, 10**6),
    synchronous=st.booleans(),
)
def test_noise_alone_raises_no_alarm(hosts, steps, noise, seed, synchronous):
    cluster = Cluster(hosts, steps, noise=noise, seed=seed, synchronous=synchronous)
    assert not detect_stragglers(cluster.records()), str(detect_stragglers(cluster.records()))


@settings(max_examples=30, deadline=None)
@given(hosts=st.integers(2, 12), seed=st.integers(0, 10**6), heavy=st.booleans())
def test_false_alarms_are_rare_whatever_the_noise(hosts, seed, heavy):
    draw = np.random.default_rng(seed)
    values = draw.pareto(1.1, (hosts, 200)) if heavy else draw.exponential(1, (hosts, 200))
    assert stands_out(values, 0.1) == []


@given(tried=st.integers(1, 60), times=st.integers(0, 60), expected=st.floats(0.02, 0.9))
def test_the_bound_is_above_the_chance_itself(tried, times, expected):
    times = min(times, tried)
    exact = sum(
        math.comb(tried, k) * expected**k * (1 - expected) ** (tried - k)
        for k in range(times, tried + 1)
    )
    assert log_chance(times, tried, expected) >= np.log(max(exact, 1e-300)) - 1e-9


def test_one_hiccup_is_no_straggler():
    cluster = Cluster(4)
    step = cluster.steps[2][100]
    cluster.steps[2][100] = type(step)(step.time, step.step, 30.0, 29.0, 29.0, 0.0, 0.0, step.host)
    assert not detect_stragglers(cluster.records())


def test_what_cannot_be_compared_is_said():
    alone = detect_stragglers(Cluster(1).records())
    assert not alone
    assert "cannot be compared" in str(alone)
    silent = detect_stragglers([*Cluster(2).records(), HostRecords(2)])
    assert "process 2 has recorded no step" in str(silent)


def test_a_throttled_chip_that_all_hosts_share_is_nobodys_fault():
    cluster = Cluster(3, slow=dict.fromkeys(range(3), ("throttle", 4.0)))
    assert not detect_stragglers(cluster.records())


def test_names_from_telemetry_are_not_markup():
    evil = Cluster(3, slow={1: ("input", 0.3)})
    evil.steps[1] = [
        type(step)(
            step.time,
            step.step,
            step.step_time_s,
            step.input_s,
            step.input_stall_s,
            0.0,
            0.0,
            "[red]host[/red]",
        )
        for step in evil.steps[1]
    ]
    console = Console(width=200, record=True)
    console.print(detect_stragglers(evil.records()))
    assert "[red]host[/red]" in console.export_text()


def test_a_run_reads_the_records_of_its_hosts(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    cluster = Cluster(3, slow={2: ("input", 0.3)})
    for process, steps in cluster.steps.items():
        writer = HostSteps(tmp_path, process)
        for step in steps:
            writer.add(
                step.step,
                step_time_s=step.step_time_s,
                input_s=step.input_s,
                input_stall_s=step.input_stall_s,
                checkpoint_s=step.checkpoint_s,
                dispatch_s=step.dispatch_s,
            )
        writer.close()
    report = Run(tmp_path).stragglers()
    assert [(one.process, one.cause) for one in report.found] == [(2, "input")]
    assert (report.hosts, report.steps) == (3, 200)


def test_timed_rounds_are_compared_with_their_mean():
    found = find_stragglers({"a": [1.0, 1.1, 0.9], "b": [1.0, 1.0], "c": [2.0, 2.2, 1.9]})
    assert found.slow == ("c",)
    assert found.skew == pytest.approx(2.0 / (4.0 / 3))
    assert not find_stragglers({"a": [1.0], "b": [1.1]})


def test_readings_without_steps_are_enough_for_a_link():
    hosts = [
        HostRecords(
            process,
            (),
            [
                Reading(
                    float(second),
                    f"h{process}",
                    process,
                    "x",
                    (Sample("ici_link_health", 10.0 if process else 0.0, 0),),
                )
                for second in range(5)
            ],
        )
        for process in range(2)
    ]
    (found,) = detect_stragglers(hosts).found
    assert (found.process, found.cause, found.share) == (1, "link", None)

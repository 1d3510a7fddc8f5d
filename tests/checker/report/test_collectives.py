"""Collectives joined with the simulation that timed them: no second is lost or counted twice."""

import itertools

import pytest

from tpukit.checker.report.build import live_memory
from tpukit.checker.report.collectives import collective_rows
from tpukit.compiler.hlo import parse_hlo
from tpukit.compiler.memory.assignment import Schedule
from tpukit.compiler.timeline import Machine, Network, Simulation, TrackSpan
from tpukit.hardware import Slice

NETWORK = Network(
    Machine.of(Slice.parse("v6e-8")), tuple(itertools.product(range(2), range(4))), (0,) * 8
)
WHOLE, PART = "bf16[8192,8192]{1,0}", "bf16[1024,8192]{1,0}"
GROUPS = "replica_groups=[1,8]<=[8]"
PROGRAM = f"""HloModule jit_step, is_scheduled=true, num_partitions=8

%body (p: (s32[], {PART})) -> (s32[], {PART}) {{
  %p = (s32[], {PART}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %w = {PART} get-tuple-element(%p), index=1
  %ag-start = ({PART}, {WHOLE}) all-gather-start(%w), {GROUPS}, dimensions={{0}}
  %work = {PART} add(%w, %w)
  %ag-done = {WHOLE} all-gather-done(%ag-start)
  %use = {PART} fusion(%ag-done), kind=kLoop, calls=%inner
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %out = (s32[], {PART}) tuple(%next, %use)
}}

%inner (q: {WHOLE}) -> {PART} {{
  %q = {WHOLE} parameter(0)
  ROOT %cut = {PART} slice(%q), slice={{[0:1024], [0:8192]}}
}}

%condition (p: (s32[], {PART})) -> pred[] {{
  %p = (s32[], {PART}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %n = s32[] constant(4)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}}

ENTRY %main (a: {PART}) -> {WHOLE} {{
  %a = {PART} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], {PART}) tuple(%zero, %a)
  %loop = (s32[], {PART}) while(%start), condition=%condition, body=%body
  %w = {PART} get-tuple-element(%loop), index=1
  ROOT %sum = {WHOLE} all-reduce(%w), {GROUPS}, to_apply=%inner
}}
"""


@pytest.fixture(scope="module")
def simulated():
    module = parse_hlo(PROGRAM)
    simulation = Simulation(module, NETWORK)
    simulation.run()
    return module, simulation.ledger


def test_rows_add_up_to_what_the_simulation_charged(simulated):
    module, ledger = simulated
    rows = collective_rows(module, ledger.spans, NETWORK)
    assert {(row["kind"], row["group_size"], row["times"]) for row in rows} == {
        ("all-gather", 8, 4),
        ("all-reduce", 8, 1),
    }
    assert sum(row["seconds"] for row in rows) == pytest.approx(ledger.hidden_s["ici"])
    assert sum(row["exposed_s"] for row in rows) == pytest.approx(ledger.seconds["ici"])


def test_work_behind_a_transfer_hides_that_much_of_it(simulated):
    module, ledger = simulated
    rows = {row["kind"]: row for row in collective_rows(module, ledger.spans, NETWORK)}
    work = next(span for span in ledger.spans if span.name == "work")
    gather = rows["all-gather"]
    assert gather["bytes"] == 8192 * 8192 * 2
    assert gather["exposed_s"] == pytest.approx(gather["seconds"] - 4 * work.duration_s)
    # Nothing runs beside the other one; its start is waited for too.
    assert rows["all-reduce"]["exposed_s"] >= rows["all-reduce"]["seconds"]


def test_the_most_waited_for_comes_first(simulated):
    module, ledger = simulated
    waits = [row["exposed_s"] for row in collective_rows(module, ledger.spans, NETWORK)]
    assert waits == sorted(waits, reverse=True)


def test_memory_is_told_by_the_clock_of_the_step():
    spans = [
        TrackSpan("core", "a", 0.0, 1.0, "hbm"),
        TrackSpan("core", "b", 1.0, 2.0, "hbm"),
        TrackSpan("core", "loop", 1.0, 8.0, "loop"),
        TrackSpan("core", "c", 9.0, 1.0, "hbm"),
    ]
    # A bitcast takes no time; the loop stands behind its body and does not turn the clock back.
    schedule = Schedule(("a", "bitcast", "b", "loop", "c"), {})
    curve = tuple((place, 100 * place) for place in range(5))
    assert live_memory(curve, schedule, spans) == [
        [0.0, 0], [0.0, 100], [1.0, 200], [1.0, 300], [9.0, 400],
    ]  # fmt: skip
    assert live_memory(curve, Schedule((), {}), spans) == []

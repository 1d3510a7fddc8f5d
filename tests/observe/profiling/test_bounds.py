"""Programs made to be bound by one thing are told apart, from recordings of real runs."""

import pytest
from bound_programs import DEPTH, ROUNDS

from tpukit.observe.profiling.judging import KINDS

MADE_FOR = ("compute", "memory", "communication", "input")


@pytest.mark.parametrize("kind", MADE_FOR)
def test_what_bounds_a_program_has_the_largest_share(recorded, kind):
    analysis = recorded(kind).analyze_bottlenecks()
    assert analysis.largest == kind, dict(analysis.shares)
    assert sum(analysis[f"{one}_bound"] for one in KINDS) == pytest.approx(1.0, abs=1e-9)
    assert all(0.0 <= analysis.shares[one] <= 1.0 for one in KINDS)
    assert analysis.origin == "measured"
    assert analysis.label == f"{kind} step"


@pytest.mark.parametrize("kind", MADE_FOR)
def test_the_first_recommendations_name_it_with_a_figure(recorded, kind):
    analysis = recorded(kind).analyze_bottlenecks()
    said = {
        "compute": "Arithmetic bounds",
        "memory": "memory bounds",
        "communication": "wait for each other",
        "input": "wait for the host",
    }[kind]
    (line,) = [one for one in analysis["recommendations"] if said in one]
    assert f"{analysis.shares[kind]:.0%}" in line
    assert "measured" in line


def test_products_are_counted_as_the_program_does_them(recorded):
    analysis = recorded("compute").analyze_bottlenecks()
    products = [op for op in analysis.ops if op.kind == "compute"]
    assert len(products) == DEPTH
    for op in products:
        assert op.by == "intensity"
        assert op.flops == 2 * 512**3
        assert op.source.startswith("benchmarks/bound_programs.py:")
    # The first multiplies an array with itself and reads it once.
    arrays = sorted(op.moved_bytes / (512**2 * 4) for op in products)
    assert arrays == [2, *[3] * (DEPTH - 1)]


def test_elementwise_work_moves_three_arrays(recorded):
    heaviest = recorded("memory").analyze_bottlenecks().ops[0]
    assert heaviest.moved_bytes == 3 * 4_000_000 * 4
    assert heaviest.times == 6  # two sums in each of three steps


def test_collectives_are_found_on_every_device(recorded):
    analysis = recorded("communication").analyze_bottlenecks()
    assert analysis.devices == 8
    kinds = {op.opcode: op for op in analysis.ops if op.kind == "communication"}
    assert set(kinds) == {"all-reduce", "all-to-all"}
    runs = sum(op.times for op in analysis.ops if op.opcode == "all-reduce")
    assert runs == 3 * ROUNDS * 8


def test_a_slow_reader_is_named(recorded):
    analysis = recorded("input").analyze_bottlenecks()
    assert analysis.findings.waits[0].where.startswith("bound_programs.py:")
    assert "next_batch" in analysis.findings.waits[0].where
    # Three sleeps of 30 ms and nothing else of that size.
    assert analysis.findings.waits[0].seconds >= 0.09
    assert any("device_put" in one.what.lower() or "DevicePut" in one.what
               for one in analysis.findings.transfers)  # fmt: skip
    named = [one for one in analysis.findings.transfers if "next_batch" in one.where]
    assert named

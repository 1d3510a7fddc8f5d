"""The scalar program: loops turn as often as the table says, and nothing unknown is guessed."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpukit.compiler.bundles import parse_listing, trace_call
from tpukit.compiler.bundles.core_run import run_program
from tpukit.compiler.bundles.listing import InstructionBundle, InstructionListing, SlotInstruction
from tpukit.compiler.bundles.scalar import (
    NAMESPACE,
    UNKNOWN,
    add,
    both,
    choose,
    either,
    expression,
    signed,
)
from tpukit.compiler.bundles.segments import _branches
from tpukit.compiler.bundles.units import core_of
from tpukit.errors import XLACompilationError

DATA = Path(__file__).parent / "data"
BLOCK_BYTES = 8 * 128 * 4


def run(chip, lengths, *, core_number=0):
    """Run a kernel whose i-th grid step turns its inner loop lengths[i] times."""
    text = (DATA / f"looped_{chip}.txt").read_text()
    tables = {} if lengths is None else {0: lengths}
    return run_program(parse_listing(text), core_of(chip), core_number=core_number, tables=tables)


def moved(found, direction):
    return sum(one.granules * 32 for one in found.transfers if one.direction == direction)


@pytest.mark.parametrize("chip", ["v5e", "v6e", "7x"])
@settings(max_examples=15, deadline=None)
@given(lengths=st.lists(st.integers(0, 9), min_size=4, max_size=4))
def test_each_turn_of_the_inner_loop_loads_once(chip, lengths):
    none, some = run(chip, (0, 0, 0, 0)), run(chip, lengths)
    assert some.busy["VLOAD"] - none.busy["VLOAD"] == sum(lengths)
    assert some.loop_turns == none.loop_turns == 4 + 2  # two fill and drain the pipeline


def test_a_table_of_negative_lengths_turns_no_loop():
    assert run("v6e", (-1, -5, 0, 0)).bundles == run("v6e", (0, 0, 0, 0)).bundles


@pytest.mark.parametrize("chip", ["v5e", "v6e"])
def test_every_block_moves_once_each_way(chip):
    found = run(chip, (1, 2, 3, 4))
    assert moved(found, "out") == 4 * BLOCK_BYTES
    assert moved(found, "in") == 4 * BLOCK_BYTES + 16 * 32  # and the table


def test_two_cores_share_the_grid():
    first, second = (run("v5p", (3, 0, 5, 7), core_number=number) for number in (0, 1))
    idle = run("v5p", (0, 0, 0, 0))
    assert first.busy["VLOAD"] - idle.busy["VLOAD"] == 3 + 0
    assert second.busy["VLOAD"] - idle.busy["VLOAD"] == 5 + 7
    trace = trace_call(
        "looped", (DATA / "looped_v5p.txt").read_text(), "v5p", tables={0: (3, 0, 5, 7)}
    )
    assert [core.bundles for core in trace.cores] == [first.bundles, second.bundles]
    assert trace.hbm_bytes == 2 * 4 * BLOCK_BYTES + 2 * 16 * 32


def test_a_kernel_that_does_not_ask_for_its_core_runs_on_one():
    text = (DATA / "looped_v6e.txt").read_text()
    assert len(trace_call("looped", text, "v6e", tables={0: (1, 2, 3, 4)}).cores) == 1


@pytest.mark.parametrize("chip", ["v5e", "v5p", "v6e", "7x"])
def test_a_loop_of_unknown_length_is_refused(chip):
    with pytest.raises(XLACompilationError, match="pass the integers it prefetches"):
        run(chip, None)


def test_a_program_that_does_not_end_is_given_up():
    text = (DATA / "looped_v6e.txt").read_text()
    with pytest.raises(XLACompilationError, match="had not ended after 50 code segments"):
        trace_call("looped", text, "v6e", tables={0: (9, 9, 9, 9)}, step_limit=50)


def test_a_chip_nobody_studied_is_refused():
    with pytest.raises(XLACompilationError, match=r"latencies of its core are not known.*v5e"):
        trace_call("looped", (DATA / "looped_v6e.txt").read_text(), "v3")


def test_unknown_values_stay_unknown_and_never_decide():
    assert add(UNKNOWN, 1) is UNKNOWN
    assert both(False, UNKNOWN) is False
    assert either(True, UNKNOWN) is True
    assert both(True, UNKNOWN) is UNKNOWN
    assert choose(UNKNOWN, 3, 4) is UNKNOWN
    with pytest.raises(XLACompilationError, match="an unknown value"):
        bool(UNKNOWN)


@given(st.integers(-(2**33), 2**33))
def test_numbers_wrap_like_32_bit_integers(value):
    assert signed(value) == int.from_bytes(
        (value % 2**32).to_bytes(4, "little"), "little", signed=True
    )


def branching(*following, region=None):
    """A program of a branch, bundles behind it, and what it goes to."""
    branch = SlotInstruction("", "sbr.rel", "target = $region9", predicate="p1_p0")
    bundles = [
        InstructionBundle("", 1, (branch,)),
        *(InstructionBundle("", 1, one) for one in following),
    ]
    if region is not None:
        bundles[region] = dataclasses.replace(bundles[region], regions=(8,))
    return InstructionListing(
        (*bundles, *[InstructionBundle("", 1, ())] * 8, InstructionBundle("PF", 1, (), (9,)))
    )


@pytest.mark.parametrize(
    ("region", "slots"),
    [(4, 3), (None, 1)],
    ids=["what is jumped over begins behind it", "nothing says where it begins"],
)
def test_a_transfer_belongs_to_a_branch_on_7x_where_the_next_region_begins_behind_it(region, slots):
    transfer = SlotInstruction("", "dma.hbm_to_vmem", "%s1, 64, %s2, %s3", "p2_p1", negated=True)
    program = branching((), (transfer,), (), (), region=region)
    (branch,) = _branches(program, core_of("7x"))
    assert branch.end - branch.address - 1 == slots


def test_a_wait_that_needs_what_a_taken_branch_leaves_out_is_no_delay_slot():
    flag = SlotInstruction(
        "s7_s2", "scalar_lea.sflag", "[#allocation6], %s6_s1", "p1_p0", negated=True
    )
    wait = SlotInstruction("", "dma.done.wait", "%s7_s2, 4096", "p3_p1")
    program = branching((flag,), (), (wait,), (), region=4)
    (branch,) = _branches(program, core_of("7x"))
    assert branch.end - branch.address - 1 == 2


@given(st.integers(0, 2**32 - 1), st.integers(1, 2**32 - 1))
def test_divisions_are_those_of_unsigned_numbers(a, b):
    for asked, expected in (("rem", a % b), ("div", a // b)):
        one = SlotInstruction("s9_s99", f"sdivrem.u32.{asked}", f"{signed(a)}, {signed(b)}")
        assert eval(expression(one), dict(NAMESPACE)) == signed(expected)


def test_a_division_by_nothing_is_not_known():
    one = SlotInstruction("s9_s99", "sdivrem.u32.rem", "7, 0")
    assert eval(expression(one), dict(NAMESPACE)) is UNKNOWN

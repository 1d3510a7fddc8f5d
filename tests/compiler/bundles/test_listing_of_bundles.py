"""Listings of bundles: what the compiler wrote is read, what it did not write is refused."""

import contextlib
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpukit.compiler.bundles import parse_listing
from tpukit.compiler.bundles.core_run import run_program
from tpukit.compiler.bundles.listing import NEVER
from tpukit.compiler.bundles.units import UNITS, core_of, read_opcode
from tpukit.errors import XLACompilationError

DATA = Path(__file__).parent / "data"
CHIPS = ("v5e", "v5p", "v6e", "7x")
# What a bundle may hold at once is counted by the compiler; these it counts as engine cycles.
COUNTED_BY_SLOT = ("VALU", "EUP", "VSTORE")


def listing(chip):
    return (DATA / f"looped_{chip}.txt").read_text()


def compilers_own_count(chip):
    """The totals of the compiler's `*-final_hlo-static-per-bundle-utilization.txt`."""
    names, rows = (DATA / f"looped_{chip}_units.txt").read_text().split("== UTILIZATION:\n")
    units = [name.strip() for name in names.splitlines()[1].split(",")]
    capacity = [int(size) for size in names.splitlines()[2].split()]
    table = [[int(cell) for cell in row.split()] for row in rows.strip().splitlines()]
    return (
        len(table),
        dict(zip(units, (sum(column) for column in zip(*table, strict=True)), strict=True)),
        dict(zip(units, capacity, strict=True)),
    )


@pytest.mark.parametrize("chip", CHIPS)
def test_units_are_those_the_compiler_counts(chip):
    bundles, theirs, capacity = compilers_own_count(chip)
    read = parse_listing(listing(chip))
    ours = Counter(
        read_opcode(one.opcode).unit for bundle in read.bundles for one in bundle.instructions
    )
    assert len(read.bundles) == bundles
    assert {unit: ours[unit] for unit in COUNTED_BY_SLOT} == {
        unit: theirs[unit] for unit in COUNTED_BY_SLOT
    }
    slots = {"VLOAD": "VLOAD", "VSTORE": "VSTORE"} | {unit: unit for unit in UNITS}
    assert {unit: core_of(chip).slots[unit] for unit in slots} == {
        unit: capacity[name] for unit, name in slots.items()
    }


def test_nested_comments_and_guards_are_read():
    text = (
        "= control target key end\n"
        "     0   :  { %s1_s2 = smov (!%p3_p0, %s4_s2), 7 /* a /* b */ {c} ;; */  ;;"
        "  %5 = dma.hbm_to_vmem [thread:$0]  (%p3_p0), /*hbm=*/%s6_s1, 16, %s7_s3, "
        "[#allocation2 + $0x1] } /* Start region 4 :: End region 4 */\n"
        "   0x1 PF: >> {}\n"
    )
    first, second = parse_listing(text).bundles
    move, transfer = first.instructions
    assert (move.target, move.predicate, move.negated, move.otherwise) == (
        "s1_s2", "p3_p0", True, "s4_s2",
    )  # fmt: skip
    assert move.operands == ("7",)
    assert transfer.operands == ("%s6_s1", "16", "%s7_s3", "[#allocation2 + $0x1]")
    assert first.regions == (4,)
    assert (second.label, second.depth) == ("PF", 2)


def test_a_division_and_what_never_runs_are_read():
    text = (
        "= control target key end\n"
        "     0   :  { %41 = sdivrem.u32 %s1_s2, 3 /* kRem */  ;;  %s5_s3 = smov 9 }\n"
        "   0x1   :  { %s2_s4 = spop.drf %41  ;;  %6 = dma.general (0), /*src=*/%s1_s2, 0, %s5_s3, "
        "%s2_s4 }\n"
    )
    first, second = parse_listing(text).bundles
    division, (result, transfer) = first.instructions[0], second.instructions
    assert division.opcode == "sdivrem.u32.rem"
    assert division.operands == ("%s1_s2", "3")
    assert result.reads == (division.target,)
    assert transfer.predicate == NEVER
    assert transfer.operands == ("%s1_s2", "0", "%s5_s3", "%s2_s4")
    assert NEVER not in transfer.reads


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "preamble is missing"),
        ("= control target key end\n", "no bundle"),
        ("= control target key end\n 0 : { /* x }\n", "comment has no end"),
        ("= control target key end\n 0 : { x }\n 0x2 : { y }\n", "bundle 0x1 is missing"),
        ("= control target key end\n 0 : { %1 = smov 3\n", "no end"),
        ("= control target key end\n 0 : { ?? }\n", "is no instruction"),
    ],
)
def test_what_is_no_listing_is_refused(text, what):
    with pytest.raises(XLACompilationError, match=what):
        parse_listing(text)


class TestDamagedText:
    """Whatever is done to a listing, it is read, run or refused; never a hang, never a crash."""

    def run(self, text):
        with contextlib.suppress(XLACompilationError):
            run_program(
                parse_listing(text), core_of("v6e"), tables={0: (1, 2, 0, 1)}, step_limit=400
            )

    @settings(max_examples=40, deadline=None)
    @given(st.integers(0, 13000))
    def test_cut_short(self, length):
        self.run(listing("v6e")[:length])

    @settings(max_examples=60, deadline=None)
    @given(
        st.integers(200, 13000),
        st.integers(0, 40),
        st.text("0123456789abpsx%()[]{};:,$#!+ \n/*=.region", max_size=30),
    )
    def test_garbled(self, place, dropped, put_in):
        text = listing("v6e")
        self.run(text[:place] + put_in + text[place + dropped :])

"""Purposes of real programs' buffers against a truth that was written down by hand."""

import re

import pytest
from known_programs import PROGRAMS, in_order

from tpukit.compiler import compile_for

pytestmark = [pytest.mark.libtpu, pytest.mark.xdist_group("libtpu")]
ARGUMENTS = ("parameters", "optimizer state", "batch inputs", "arguments", "results")
SMALLEST = 2**24  # bytes of a buffer that is looked at


def shape_key(shape):
    dtype, dims = re.fullmatch(r"(\w+)\[([\d,]*)\]", shape).groups()
    return in_order(f"{dtype} {dims.replace(',', 'x')}")


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_every_large_temporary_has_its_true_purpose(program):
    compiled = compile_for(
        program.step, program.slice, *program.arguments, donate_argnums=(0,), until="memory"
    )
    temporaries = [
        one
        for one in compiled.memory.buffers
        if one.space == "HBM" and one.purpose not in ARGUMENTS and one.size_bytes >= SMALLEST
    ]
    seen = {(shape_key(one.shape), one.purpose) for one in temporaries}
    assert {(in_order(shape), purpose) for shape, purpose in program.must_hold} <= seen
    for one in temporaries:
        truth = program.purpose(shape_key(one.shape), one.name)
        assert truth is not None, f"nobody wrote down what {one.shape} of {one.name} is"
        assert one.purpose in truth.split("|"), (one.shape, one.name, truth)

"""What a device does with products of each format."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpukit.compiler.timeline.machine import Machine, MatrixProduct
from tpukit.hardware import Slice


def seconds(chip, dtype):
    machine = Machine.of(Slice.parse(chip), op_time_in_a_step=1.0)
    return machine.matrix_s([MatrixProduct(1e15, dtype, 0)])


@pytest.mark.parametrize(("chip", "times_faster"), [("v5e-1", 2.0), ("v6e-1", 2 * 0.72)])
def test_int8_products_reach_less_of_their_peak_on_v6e(chip, times_faster):
    assert seconds(chip, "bf16") / seconds(chip, "s8") == pytest.approx(times_faster, rel=0.01)


def test_wide_operands_are_fed_as_bfloat16():
    assert seconds("v6e-1", "f32") == seconds("v6e-1", "bf16")


def test_a_v6e_sends_to_other_slices_as_fast_as_published():
    machine = Machine.of(Slice.parse("2xv6e-256"))
    assert machine.dcn_bytes_per_s == pytest.approx(4.11e9, rel=0.01)  # tpu-recipes: psum_dcn


FORMATS = ("bf16", "f32", "s8", "f8e4m3fn", "f8e5m2", "s4")
ALONE_AND_IN_A_STEP = (1.0, None)


@given(
    st.sampled_from(["v4-8", "v5e-1", "v5p-8", "v6e-1", "tpu7x-2x2x1"]),
    st.sampled_from(ALONE_AND_IN_A_STEP),
    st.lists(
        st.tuples(st.floats(1e3, 1e18), st.sampled_from(FORMATS), st.integers(0, 10**12)),
        min_size=1,
    ),
    st.floats(1.0, 1e15),
)
def test_nothing_exceeds_the_peak_or_the_stated_bandwidth(name, op_time, products, moved):
    target = Slice.parse(name)
    chip, machine = target.chip, Machine.of(target, op_time_in_a_step=op_time)
    least = sum(flops / machine.peak_flops(dtype) for flops, dtype, _ in products)
    assert machine.matrix_s([MatrixProduct(*one) for one in products]) >= least
    assert moved / machine.hbm_s(moved) <= chip.per_device(chip.hbm_gbps).value * 1e9

"""What a device does with products of each format."""

import pytest

from tpukit.compiler.timeline.machine import Machine
from tpukit.compiler.timeline.work import Product
from tpukit.hardware import Slice


def seconds(chip, dtype):
    machine = Machine.of(Slice.parse(chip), op_time_in_a_step=1.0)
    return machine.matrix_s([Product(1e15, dtype, 0)])


@pytest.mark.parametrize(("chip", "times_faster"), [("v5e-1", 2.0), ("v6e-1", 2 * 0.72)])
def test_int8_products_reach_less_of_their_peak_on_v6e(chip, times_faster):
    assert seconds(chip, "bf16") / seconds(chip, "s8") == pytest.approx(times_faster, rel=0.01)


def test_wide_operands_are_fed_as_bfloat16():
    assert seconds("v6e-1", "f32") == seconds("v6e-1", "bf16")


def test_a_v6e_sends_to_other_slices_as_fast_as_published():
    machine = Machine.of(Slice.parse("2xv6e-256"))
    assert machine.dcn_bytes_per_s == pytest.approx(4.11e9, rel=0.01)  # tpu-recipes: psum_dcn

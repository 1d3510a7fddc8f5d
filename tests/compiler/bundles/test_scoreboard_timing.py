"""When bundles issue: stretches small enough to time by hand from the compiler's latencies."""

import pytest

from tpukit.compiler.bundles import parse_listing
from tpukit.compiler.bundles.segments import time_stretch
from tpukit.compiler.bundles.units import core_of

V6E = core_of("v6e")


def stretch(*bundles, core=V6E):
    lines = [f"   {number:#x}   :  {{ {slots} }}" for number, slots in enumerate(bundles)]
    text = "= control target key end\n" + "\n".join(lines).replace("0x0 ", "  0 ") + "\n"
    return time_stretch(parse_listing(text).bundles, core)


def test_independent_bundles_issue_one_a_cycle():
    found = stretch("%v1_v0 = vadd.f32 %v8_v8, %v9_v9", "%v2_v1 = vadd.f32 %v8_v8, %v9_v9")
    assert found.issue_cycles == (0, 1)
    assert found.cycles == 2
    assert not found.waits


def test_a_result_is_waited_for():
    found = stretch("%v1_v0 = vadd.f32 %v8_v8, %v9_v9", "%v2_v1 = vadd.f32 %v1_v0, %v9_v9")
    assert found.issue_cycles == (0, 2)
    assert found.waits == {"VALU": 1}


def test_a_lane_sum_takes_what_the_compiler_says():
    found = stretch("%5 = vadd.xlane.f32.xlu0 %v1_v0", "%v2_v1 = vpop.xlane.xlu0 %5")
    assert found.issue_cycles == (0, V6E.lane_result)


def test_products_on_one_unit_keep_their_distance_and_on_two_do_not():
    product = "%{} = vmatmul.mubr.bf16.gmra.mxu{} %v1_v0"
    same = stretch(product.format(1, 0), product.format(2, 0))
    apart = stretch(product.format(1, 0), product.format(2, 1))
    assert same.issue_cycles == (0, 8)
    assert same.waits == {"MXU busy": 7}
    assert apart.issue_cycles == (0, 1)
    assert same.busy["MXU"] == 16


def test_results_come_out_in_the_order_of_products():
    # Two bf16 products of two rows each, four results: two belong to each product.
    found = stretch(
        "%1 = vmatmul.mubr.bf16.gmra.mxu0 %v1_v0",
        "%2 = vmatmul.mubr.bf16.gmra.mxu0 %v1_v0",
        *(f"%v{number}_v2 = vpop.f32.mrf.mxu0" for number in range(10, 14)),
    )
    first = V6E.matrix_result
    assert found.issue_cycles == (0, 8, first, first + 1, 8 + first, 8 + first + 1)


def test_narrow_and_wide_products_give_results_by_their_rows():
    # A float32 product takes half the rows of a bf16 one: one result, then two.
    found = stretch(
        "%1 = vmatmul.mubr.f32.gmra.mxu0 %v1_v0",
        "%2 = vmatmul.mubr.bf16.gmra.mxu0 %v1_v0",
        *(f"%v{number}_v2 = vpop.f32.mrf.mxu0" for number in range(10, 13)),
    )
    first = V6E.matrix_result
    assert found.issue_cycles == (0, 4, first, 4 + first, 4 + first + 1)


def test_a_buffer_entry_is_that_of_the_product_before_it():
    core = core_of("7x")
    found = stretch(
        "%1 = vmatmul.mubr.bf16.gmra.mrb[0].mxu0 %v1_v0",
        "%2 = vmatmul.mubr.bf16.gmra.mrb[4].mxu0 %v1_v0",
        "%v3_v1 = vpop.f32.mrb[5].mxu0",
        "%v4_v2 = vpop.f32.mrb[3].mxu0",
        core=core,
    )
    assert found.issue_cycles == (0, 8, 8 + core.matrix_result, 8 + core.matrix_result + 1)


@pytest.mark.parametrize(("chip", "second"), [("v5e", 1), ("v6e", 8)])
def test_weights_load_beside_products_only_where_there_is_room_for_them(chip, second):
    product = "vmatmul.bf16.gmra.mxu0" if chip == "v5e" else "vmatmul.mubr.bf16.gmra.mxu0"
    found = stretch(
        f"%1 = {product} %v1_v0", "%2 = vmatpush.bf16.msrb.mxu0 %v2_v1", core=core_of(chip)
    )
    assert found.issue_cycles == (0, second)

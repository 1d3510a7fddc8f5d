"""Kernels inside a step: splash by blocks, ragged products by tiles, others by what they state."""

import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as info

from tpukit.compiler.hlo import Shape, parse_hlo
from tpukit.compiler.timeline.kernels import (
    RaggedDotTimer,
    StatedCostTimer,
    StepKernelTimer,
    _visited_share,
    has_own_model,
)
from tpukit.compiler.timeline.machine import Machine
from tpukit.hardware import Slice

M, K, N, GROUPS = 8192, 2048, 4096, 8
HEAD = "HloModule jit_f, is_scheduled=true\n\nENTRY %main (a: f32[8]) -> f32[8] {\n"


def machine():
    return Machine.of(Slice.parse("v6e-1"), op_time_in_a_step=1.0)


def ragged(tiling, *, m=M, n=N):
    text = (
        f"{HEAD}  %rows = bf16[{m},{K}]{{1,0}} parameter(0)\n"
        f"  %weights = bf16[{GROUPS},{K},{n}]{{2,1,0}} parameter(1)\n"
        f"  ROOT %k = bf16[{m},{n}]{{1,0}} custom-call(%rows, %weights), "
        'custom_call_target="tpu_custom_call", frontend_attributes={mosaic_fusion_entry_point='
        f'"true",ragged_dot_tiling="{tiling}"}}, metadata={{op_name="f/ragged-dot-none"}}\n}}\n'
    )
    entry = parse_hlo(text).entry
    return entry.by_name["k"], entry


def test_a_product_bound_by_the_matrix_unit_pays_for_shared_tiles():
    model = machine()
    seconds = RaggedDotTimer(model)(*ragged(f"256,{K},{N}"))
    visits = M // 256 + GROUPS - 1
    flops = 2 * visits * 256 * K * N
    expected = flops / (918e12 * model.matrix_efficiency) + model.op_overhead_s
    assert seconds == pytest.approx(expected)


def test_narrow_tiles_read_the_rows_again_and_again():
    model = machine()
    seconds = RaggedDotTimer(model)(*ragged(f"128,{K},128", n=256))
    visits = M // 128 + GROUPS - 1
    moved = visits * 128 * K * 2 * 2 + GROUPS * K * 256 * 2 + M * 256 * 2
    assert seconds == pytest.approx(model.hbm_s(moved) + model.op_overhead_s)


def test_a_sum_in_parts_loads_the_weights_at_every_visit():
    model = machine()
    whole = RaggedDotTimer(model)(*ragged(f"64,{K},{N}", m=512))
    parts = RaggedDotTimer(model)(*ragged(f"64,{K // 2},{N}", m=512))
    visits = 512 // 64 + GROUPS - 1
    weights = GROUPS * K * N * 2
    assert parts - whole == pytest.approx(model.hbm_s(weights * (visits / GROUPS - 1)), rel=1e-6)


def splash(name):
    heads = "bf16[8,4096,128]{2,1,0}"
    text = (
        f"{HEAD}  %q = {heads} parameter(0)\n  %k = {heads} parameter(1)\n"
        f"  ROOT %{name}.1 = {heads} custom-call(%q, %k), "
        'custom_call_target="tpu_custom_call"\n}\n'
    )
    entry = parse_hlo(text).entry
    return entry.by_name[f"{name}.1"], entry


def test_a_model_of_ones_own_is_asked_first():
    def of_splash(kernel, parent):
        return 1.5 if "splash" in kernel.name else None

    timer = StepKernelTimer(machine(), own=(of_splash,))
    assert timer(*splash("splash_mha_fwd")) == 1.5
    usual = StepKernelTimer(machine())
    kernel = ragged(f"256,{K},{N}")
    assert timer(*kernel) == usual(*kernel)
    assert usual(*splash("splash_mha_fwd")) < 1


def other(config, *, name="my_kernel", dtype="bf16"):
    text = (
        f"{HEAD}  %a = {dtype}[1024,1024]{{1,0}} parameter(0)\n"
        "  ROOT %k = bf16[1024,1024]{1,0} custom-call(%a), "
        'custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/'
        f'{name}"}}, '
        f"backend_config={config}\n}}\n"
    )
    entry = parse_hlo(text).entry
    return entry.by_name["k"], entry


def test_a_kernel_is_held_to_the_costs_it_states():
    model = machine()
    stated = '{"custom_call_config":{"cost_estimate":{"flops":"1000","bytes_accessed":"1640000"}}}'
    timer = StepKernelTimer(model)
    assert timer(*other(stated)) == pytest.approx(model.hbm_s(1.64e6) + model.op_overhead_s)
    assert timer.by_stated_cost == ["k"]


@pytest.mark.parametrize(
    ("slice_name", "dtype", "tflops"),
    [
        ("v6e-1", "s8", 1836),
        ("v6e-1", "f8e4m3fn", 918),
        ("v6e-1", "s32", 918),
        ("tpu7x-1x1x1", "f8e4m3fn", 4614 / 2),
        ("tpu7x-1x1x1", "s8", 2307 / 2),
    ],
)
def test_stated_flops_are_made_at_the_rate_of_the_operands(slice_name, dtype, tflops):
    model = Machine.of(Slice.parse(slice_name))
    stated = '{"custom_call_config":{"cost_estimate":{"flops":"1e12"}}}'
    seconds = StatedCostTimer(model)(*other(stated, dtype=dtype)) - model.op_overhead_s
    assert seconds == pytest.approx(1 / (tflops * model.matrix_efficiency))


@pytest.mark.parametrize("name", ["grouped_matmul", "grouped_matmul_dlhs", "grouped_matmul_drhs"])
def test_grouped_products_have_a_model_of_their_own(name):
    model = machine()
    stated = '{"custom_call_config":{"cost_estimate":{"flops":"1e12","bytes_accessed":"1e6"}}}'
    timer = StepKernelTimer(model)
    kernel, parent = other(stated, name=f"cond/branch_0_fun/{name}/pallas_call")
    expected = 1e12 / (918e12 * model.streamed_matrix_efficiency) + model.op_overhead_s
    assert timer(kernel, parent) == pytest.approx(expected)
    assert not timer.by_stated_cost
    assert has_own_model(kernel)
    assert not has_own_model(other(stated, name="my_grouped_matmul_like")[0])


def test_a_kernel_that_states_nothing_has_no_time():
    assert StatedCostTimer(machine())(*other('{"custom_call_config":{}}')) is None
    assert StepKernelTimer(machine())(*other("{}")) is None


LENGTH, BLOCK = 8192, 512
CAUSAL = masks.CausalMask((LENGTH, LENGTH))
WINDOW = masks.LocalMask((LENGTH, LENGTH), window_size=(1023, 0), offset=0)


def shares(mask, *, by_keys):
    """What the timeline takes as visited, and what jax tabulates."""
    tabulate = info.process_mask_dkv if by_keys else info.process_mask
    found, _ = tabulate(masks.MultiHeadMask([mask]), (BLOCK, BLOCK))
    visited = np.count_nonzero(found.block_mask) / (LENGTH / BLOCK) ** 2
    heads = Shape("bf16", (1, LENGTH, 128))
    tables = [Shape("s8", found.block_mask.shape)]
    return _visited_share(tables, heads, heads, by_keys=by_keys), visited


@pytest.mark.parametrize("by_keys", [False, True])
def test_visited_blocks_of_a_causal_mask(by_keys):
    taken, visited = shares(CAUSAL, by_keys=by_keys)
    assert taken == visited


@pytest.mark.parametrize("by_keys", [False, True])
def test_visited_blocks_of_a_window(by_keys):
    taken, visited = shares(WINDOW, by_keys=by_keys)
    # The first (or last) two blocks see two and one fewer than the others, which is not counted.
    assert taken - visited == pytest.approx(3 / (LENGTH / BLOCK) ** 2)

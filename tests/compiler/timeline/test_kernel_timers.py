"""Kernels inside a step: splash by blocks, ragged products by tiles, others by what they state."""

import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as info

from tpukit.compiler.bundles import CallTrace, calibration_of
from tpukit.compiler.bundles.core_run import CoreRun
from tpukit.compiler.hlo import Shape, parse_hlo
from tpukit.compiler.timeline.kernels import (
    RaggedDotTimer,
    SplashTimer,
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


HEADS, QUERIES, KEYS, SIZE = 8, 4096, 2048, 128
OF_QUERIES = f"bf16[{HEADS},{QUERIES},{SIZE}]{{2,1,0}}"
OF_KEYS = f"bf16[{HEADS},{KEYS},{SIZE}]{{2,1,0}}"


def splash(name, *, grid=None, results=(OF_QUERIES,), values=OF_KEYS):
    """A splash kernel of queries, keys and values, behind a table of its grid."""
    tables = f"  %grid = s8[1,{grid[0]},{grid[1]}]{{2,1,0}} parameter(3)\n" if grid else ""
    text = (
        f"{HEAD}{tables}  %q = {OF_QUERIES} parameter(0)\n"
        f"  %k = {OF_KEYS} parameter(1)\n  %v = {values} parameter(2)\n"
        f"  ROOT %{name}.1 = ({', '.join(results)}) custom-call({'%grid, ' if grid else ''}"
        '%q, %k, %v), custom_call_target="tpu_custom_call"\n}\n'
    )
    entry = parse_hlo(text).entry
    return entry.by_name[f"{name}.1"], entry


@pytest.mark.parametrize(
    ("name", "grid", "results", "products", "visited"),
    [
        ("splash_mha_fwd", None, (OF_QUERIES,), 2, 1 / 2),  # scores, and their sum over values
        ("splash_mqa_fwd", (4, 4), (OF_QUERIES,), 2, 10 / 16),  # the blocks below the diagonal
        ("splash_mha_dq", (4, 4), (OF_QUERIES,), 3, 10 / 16),
        ("splash_mha_dkv", (4, 4), (OF_KEYS, OF_KEYS), 4, 10 / 16),
        # A fused kernel writes dq beside dk and dv, once for each block of keys.
        ("splash_mha_dkv", (4, 4), (OF_QUERIES, OF_KEYS, OF_KEYS), 5, 10 / 16),
        ("splash_mha_dkv", (4, 4), (OF_QUERIES, OF_QUERIES), 4, 10 / 16),  # dk and dv alone
        # A third result of another size is no dq.
        ("splash_mha_dkv", (4, 4), (OF_KEYS, OF_KEYS, "f32[8,128]{1,0}"), 4, 10 / 16),
        # A window: each of 8 blocks of 512 queries sees two of the four blocks of keys ...
        ("splash_mha_fwd", (8, 2), (OF_QUERIES,), 2, 2 / 4),
        # ... and each of 4 blocks of 512 keys is seen by two of the eight blocks of queries.
        ("splash_mha_dkv", (2, 4), (OF_KEYS, OF_KEYS), 4, 2 / 8),
    ],
)
def test_splash_takes_its_products_at_the_share_measured(name, grid, results, products, visited):
    model = machine()
    flops = products * 2 * HEADS * QUERIES * KEYS * SIZE * visited
    share, slower = model.attention_share(SIZE), model.attention.jax_over_tokamax_forward
    if not name.endswith("fwd"):
        share *= model.attention.backward_over_forward
        slower = model.attention.jax_over_tokamax_backward
    kernel, parent = splash(name, grid=grid, results=results)
    assert slower > share  # no kernel is at its peak
    assert StepKernelTimer(model)(kernel, parent) == pytest.approx(flops * slower / share / 918e12)
    assert has_own_model(kernel)


@pytest.mark.parametrize(
    ("name", "results", "as_queries", "as_values"),
    [
        ("splash_mha_fwd", (OF_QUERIES,), 1, 1),
        ("splash_mha_dq", (OF_QUERIES,), 2, 1),
        ("splash_mha_dkv", (OF_KEYS, OF_KEYS), 2, 2),
        ("splash_mha_dkv", (OF_QUERIES, OF_KEYS, OF_KEYS), 3, 2),
    ],
)
def test_splash_counts_values_of_another_width(name, results, as_queries, as_values):
    model = machine()
    narrow = SIZE // 2
    values = f"bf16[{HEADS},{KEYS},{narrow}]{{2,1,0}}"
    kernel, parent = splash(name, results=results, values=values)
    flops = HEADS * QUERIES * KEYS * (as_queries * SIZE + as_values * narrow)  # half of the scores
    alone = model.attention_share((SIZE + narrow) / 2) * 918e12
    kind = name.rsplit("_", 1)[1]
    backward = kind != "fwd"
    over = model.attention.backward_over_forward if backward else 1.0
    slower = SplashTimer(model).over_measured(kind)
    assert SplashTimer(model)(kernel, parent) == pytest.approx(flops * slower / (alone * over))


def test_no_splash_kernel_exceeds_the_peak():
    quick = Machine.of(Slice.parse("v6e-1"), op_time_in_a_step=0.01)
    flops = 2 * 2 * HEADS * QUERIES * KEYS * SIZE / 2
    assert SplashTimer(quick)(*splash("splash_mha_fwd")) == pytest.approx(flops / 918e12)


def test_what_ragged_products_note_down_takes_as_long_as_an_op():
    model = machine()
    text = (
        f"{HEAD}  ROOT %k = s32[64]{{0}} custom-call(), custom_call_target="
        '"tpu_custom_call", metadata={op_name="f/ragged-dot-metadata"}\n}\n'
    )
    entry = parse_hlo(text).entry
    kernel = entry.by_name["k"]
    assert RaggedDotTimer(model)(kernel, entry) == model.op_overhead_s
    assert has_own_model(kernel)
    assert has_own_model(ragged(f"256,{K},{N}")[0])


def test_a_kernel_that_was_followed_takes_its_bundles_time():
    model = Machine.of(Slice.parse("v6e-1"), op_time_in_a_step=0.5)
    run = CoreRun(
        bundles=7, compute_cycles=1_750_000, busy={}, waits={}, product_cycles=0, loop_turns=0,
        transfers=(),
    )  # fmt: skip
    traces = {"k": CallTrace("k", "v6e", 7, (run,))}
    kernel, parent = other("{}")
    # A millisecond at 1.75 GHz, of which 0.7 are measured, and 1.3 us of the launch.
    alone = 0.7e-3 + calibration_of("v6e").launch_s
    assert StepKernelTimer(model, traces)(kernel, parent) == pytest.approx(alone / 2)


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
    only_bytes = '{"custom_call_config":{"cost_estimate":{"bytes_accessed":"1640000"}}}'
    assert timer(*other(only_bytes)) == timer(*other(stated))
    nothing = '{"custom_call_config":{"cost_estimate":{"transcendentals":"9"}}}'
    assert timer(*other(nothing)) is None


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
    expected = 1e12 / (918e12 * model.grouped_efficiency) + model.op_overhead_s
    assert timer(kernel, parent) == pytest.approx(expected)
    assert not timer.by_stated_cost
    assert has_own_model(kernel)
    assert not has_own_model(other(stated, name="my_grouped_matmul_like")[0])


def test_a_token_is_no_operand_of_a_product():
    stated = '{"custom_call_config":{"cost_estimate":{"flops":"1e12"}}}'
    text = (
        f"{HEAD}  %a = bf16[1024,1024]{{1,0}} parameter(0)\n  %t = token[] after-all()\n"
        "  ROOT %k = bf16[1024,1024]{1,0} custom-call(%a, %t), "
        f'custom_call_target="tpu_custom_call", backend_config={stated}\n}}\n'
    )
    entry = parse_hlo(text).entry
    timer = StatedCostTimer(machine())
    assert timer(entry.by_name["k"], entry) == timer(*other(stated))


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

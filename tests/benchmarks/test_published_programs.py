"""Published steps where they are not ours: what they round, multiply and attend with."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from harness import PUBLISHED
from plan import candidate, model
from published_programs import (
    AQT,
    FIXED_SCALES,
    GroupedProduct,
    TokamaxGroupedTimer,
    TokamaxSplashTimer,
    kernel_timer,
    measured_products,
    program_of,
)
from published_rows import as_run

from tpukit.compiler.hlo import parse_hlo
from tpukit.compiler.timeline import Machine
from tpukit.planner.cost.model_shape import shape_of
from tpukit.planner.cost.scoring import score
from tpukit.planner.cost.step_variant import StepVariant

ROWS = {row["id"]: row for row in json.loads(Path(PUBLISHED).read_text())["results"]}
INT8 = as_run(ROWS["tri-gpt3-175b-int8-v6e-256"], quantized=True)


def step(run, program):
    shape = shape_of(run.workload.config)
    length = run.workload.sequence_length
    return score(shape, candidate(run), sequence_length=length, variant=program).step


def test_what_a_framework_rounds_is_what_it_pays_for():
    ours, theirs, fixed = (
        step(INT8, StepVariant(**rounding))
        for rounding in ({}, {"int8": AQT}, {"int8": FIXED_SCALES})
    )
    assert theirs.hbm[0] > ours.hbm[0] > fixed.hbm[0]  # with noise, and with scales beforehand
    assert theirs.matrix[0] < 0.95 * ours.matrix[0]  # gradients of weights are narrow too


def test_further_products_take_their_time():
    run = as_run(ROWS["v5p-llama3.1-405b-1024"])  # it makes its logits twice
    program = program_of(run)
    config = run.workload.config
    table = 2 * config.vocab_size * config.d_model
    assert program.other_flops_per_token(shape_of(config)) == 3 * table
    without = replace(program, further_flops_per_token=0.0)
    longer = step(run, program).matrix[0] - step(run, without).matrix[0]
    machine = Machine.of(run.slice)
    tokens = run.workload.tokens_per_step / run.slice.devices
    expected = table * tokens / (machine.peak_flops("bf16") * machine.streamed_matrix_efficiency)
    assert longer == pytest.approx(expected)
    assert model(run).step_time_s == pytest.approx(run.step_time_s, rel=0.15)


def splash(name):
    heads = "bf16[8,4096,128]{2,1,0}"
    text = (
        "HloModule jit_f, is_scheduled=true\n\nENTRY %main (a: f32[8]) -> f32[8] {\n"
        f"  %q = {heads} parameter(0)\n  %k = {heads} parameter(1)\n"
        f"  ROOT %{name}.1 = {heads} custom-call(%q, %k, %k), "
        'custom_call_target="tpu_custom_call"\n}\n'
    )
    entry = parse_hlo(text).entry
    return entry.by_name[f"{name}.1"], entry


@pytest.mark.parametrize(
    ("name", "slower"),
    [("splash_mha_fwd", 1.27), ("splash_mha_dkv", 1.07), ("splash_mha_dq", 1.07)],
)
def test_the_kernel_that_jax_ships_takes_longer_than_the_measured_one(name, slower):
    jax_row, tokamax_row = (
        as_run(ROWS[row]) for row in ("tri-llama3.1-8b-v6e-8", "wk-ll8-jax-exp27-bs4")
    )
    machine = Machine.of(jax_row.slice)
    ours, theirs = (kernel_timer(row, machine) for row in (jax_row, tokamax_row))
    assert ours(*splash(name)) == pytest.approx(slower * theirs(*splash(name)))
    assert theirs(*splash(name)) == TokamaxSplashTimer(machine)(*splash(name))


def grouped(name, first, second, result):
    text = (
        "HloModule jit_f, is_scheduled=true\n\nENTRY %main (a: f32[8]) -> f32[8] {\n"
        f"  %n = s32[] parameter(0)\n  %a = {first} parameter(1)\n  %b = {second} parameter(2)\n"
        f"  ROOT %{name}.1 = {result} custom-call(%n, %a, %b), "
        'custom_call_target="tpu_custom_call"\n}\n'
    )
    entry = parse_hlo(text).entry
    return entry.by_name[f"{name}.1"], entry


ROWS_OF_EXPERTS, WEIGHTS = "bf16[327680,2880]{1,0}", "bf16[128,2880,2880]{2,1,0}"


@pytest.mark.parametrize(
    ("name", "operands", "result", "measured_ms"),
    [
        # gpt-oss-120b's own sizes: what tokamax's autotuning measured of them on TPU7x.
        ("grouped_matmul", (ROWS_OF_EXPERTS, WEIGHTS), ROWS_OF_EXPERTS, 15.6),
        ("grouped_matmul_dlhs", (ROWS_OF_EXPERTS, WEIGHTS), ROWS_OF_EXPERTS, 15.7),
        ("grouped_matmul_drhs", (ROWS_OF_EXPERTS, ROWS_OF_EXPERTS), WEIGHTS, 17.0),
    ],
)
def test_experts_of_published_runs_take_what_tokamax_measured(name, operands, result, measured_ms):
    run = as_run(ROWS["iw-gpt-oss-120b-64"])
    machine = Machine.of(run.slice)
    kernel, parent = grouped(name, *operands, result)
    seconds = kernel_timer(run, machine)(kernel, parent)
    assert seconds == TokamaxGroupedTimer(machine)(kernel, parent)
    assert seconds == pytest.approx(measured_ms * 1e-3 * machine.op_time_in_a_step, rel=0.01)
    scout = as_run(ROWS["v5p-llama4-scout"])
    megablox = kernel_timer(scout, Machine.of(scout.slice))
    assert megablox(kernel, parent) is None  # ours state what they do, and this one does not


def test_a_size_nobody_measured_reaches_what_the_nearest_does():
    timer = TokamaxGroupedTimer(Machine.of(as_run(ROWS["iw-gpt-oss-120b-64"]).slice))
    known = next(
        one.product
        for one in measured_products("7x")
        if one.product.kind == "fwd_gmm" and one.product.fills_lanes
    )
    wider = replace(known, columns=known.columns + 128)
    longer = timer.seconds(wider) / timer.seconds(known)
    assert longer == pytest.approx(wider.columns / known.columns)
    of_eight_bits = GroupedProduct("drhs_tgmm", 262144, 7168, 2048, 256, 8)
    assert timer.seconds(of_eight_bits)  # by the one direction that was measured

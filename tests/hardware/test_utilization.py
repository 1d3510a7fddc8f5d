"""MFU is one figure: whoever shows it, the same step gives the same share of the same peak."""

import pytest

from tpukit.compiler.timeline import StepPrediction
from tpukit.hardware import (
    Figure,
    Slice,
    get_chip,
    mfu_convention,
    model_flop_utilization,
    peak_of_products,
)
from tpukit.job.config import TPUConfig
from tpukit.models import get_preset
from tpukit.planner import planning
from tpukit.step import Workload
from tpukit.training.throughput import Throughput

STEP_S = 2.0
CASES = [("v6e-8", "TPU v6 lite", 918), ("v4-16", "TPU v4", 275), ("7x:2x2x1", "TPU7x", 2307)]


@pytest.mark.parametrize(("name", "kind", "chip_tflops"), CASES)
def test_a_run_a_prediction_and_a_configuration_agree(name, kind, chip_tflops):
    class Device:
        device_kind, platform = kind, "tpu"

    target = Slice.parse(name)
    work = Workload("llama3.1-8b", batch_size=16, sequence_length=8192)
    # By hand: matmul weights without the embedding, and half of all keys.
    model = get_preset("llama3.1-8b")
    matmul = model.parameter_count().total - 128_256 * 4096 - 65 * 4096
    flops = (6 * matmul + 12 * 32 * 4096 * 8192 / 2) * 16 * 8192
    expected = flops / STEP_S / (target.chips * chip_tflops * 1e12)

    run = Throughput.of(work, [Device()] * target.devices)
    uncounted = Figure.missing("FLOP", "no program")
    prediction = StepPrediction(
        target, STEP_S, STEP_S, STEP_S, {}, {}, uncounted, (), model_flops=run.flops_per_step.value
    )
    measured = TPUConfig(accelerator_type=str(target)).get_performance_metrics(
        achieved_tflops=flops / STEP_S / 1e12
    )
    assert run.mfu(STEP_S) == pytest.approx(expected, rel=1e-6)
    assert prediction.mfu == run.mfu(STEP_S)
    assert measured["utilization"] == pytest.approx(expected, rel=1e-6)
    assert prediction.to_dict()["mfu_convention"] == mfu_convention("bf16") == run.mfu_convention


def test_a_plan_agrees_with_the_run_it_plans():
    best = planning.plan("llama3.2-1b", on="v6e-8", tokens=1e9, verify=0).best
    work = Workload(
        "llama3.2-1b", batch_size=best.batch_size, sequence_length=best.job.sequence_length
    )

    class Device:
        device_kind, platform = "TPU v6 lite", "tpu"

    run = Throughput.of(work, [Device()] * 8)
    assert best.mfu == pytest.approx(run.mfu(best.step_time_s))


@pytest.mark.parametrize(
    ("chip", "formats", "peak"),
    [
        ("v6e", (), "bf16"),
        ("v6e", ("float32", "bf16"), "bf16"),
        ("v6e", ("s8", "bf16"), "int8"),  # as the compiler spells it
        ("v6e", ("fp8",), "bf16"),  # widened first
        ("v4", ("int8",), "bf16"),
        ("7x", ("fp8",), "fp8"),
        ("7x", ("int8",), "bf16"),
    ],
)
def test_the_peak_is_that_of_the_fastest_format_multiplied(chip, formats, peak):
    assert peak_of_products(get_chip(chip), formats) == peak


def test_a_step_in_eight_bits_is_held_against_their_peak():
    class Device:
        device_kind, platform = "TPU v6 lite", "tpu"

    narrow = get_preset("llama3.1-8b", matmul="int8")
    work = Workload(narrow, batch_size=16, sequence_length=8192)
    run = Throughput.of(work, [Device()] * 8)
    assert run.peak_tflops.value == 8 * 1836
    assert run.mfu_convention.endswith("over int8 peak")
    target = Slice.parse("v6e-8")
    figures = (target, STEP_S, STEP_S, STEP_S, {}, {}, 0.0, ())
    prediction = StepPrediction(
        *figures,
        model_flops=run.flops_per_step.value,
        product_formats=frozenset(("s8", "bf16")),
    )
    assert prediction.mfu == run.mfu(STEP_S)
    best = planning.plan(narrow, on="v6e-8", tokens=1e9, verify=0).best
    assert best.mfu_peak == "int8"
    given = Throughput.of(work, [Device()] * 8, peak_tflops=100.0)
    assert (given.peak_tflops.value, given.peak_tflops.origin) == (800, "user")
    assert given.mfu_convention.endswith("over the given peak")


def test_what_is_not_known_gives_none():
    assert model_flop_utilization(None, 1.0, 100.0) is None
    assert model_flop_utilization(1e12, 1.0, None) is None
    assert model_flop_utilization(1e12, 0.0, 100.0) is None
    assert model_flop_utilization(5e13, 1.0, 100.0) == 0.5

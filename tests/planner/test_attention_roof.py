"""Attention never multiplies faster than the peak, in the planner's arithmetic or a timeline."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tpukit.compiler.hlo import parse_hlo
from tpukit.compiler.timeline import Machine
from tpukit.compiler.timeline.kernels import SplashTimer
from tpukit.hardware import Slice
from tpukit.models import get_preset
from tpukit.planner.cost.attention_time import attended_keys
from tpukit.planner.cost.candidates import Candidates, SliceMesh
from tpukit.planner.cost.model_shape import shape_of
from tpukit.planner.cost.scoring import score
from tpukit.planner.cost.step_variant import OUR_STEP, StepVariant
from tpukit.planner.cost.torus import place_axes

SLICES = ("v4-16", "v5e-8", "v5p-16", "v6e-8", "tpu7x-2x2x1")


@given(st.integers(1, 300), st.none() | st.integers(1, 400))
def test_keys_that_are_seen_are_those_counted_one_by_one(length, window):
    counted = sum(min(place + 1, window or length) for place in range(length)) / length
    assert attended_keys(length, window) == pytest.approx(counted)


@pytest.mark.parametrize("name", SLICES)
@pytest.mark.parametrize(
    "model", ["llama3.2-1b", "llama3.1-8b", "gemma3-12b"]
)  # heads 64, 128, 256
@pytest.mark.parametrize("attention", ["ours", "splash"])
@pytest.mark.parametrize("length", [512, 8192, 32768])
def test_no_plan_has_attention_above_the_peak(name, model, attention, length):
    target, config = Slice.parse(name), get_preset(model)
    sizes = {"fsdp": 8}
    mesh = SliceMesh(target, sizes, place_axes(target, sizes))
    zero, one = np.asarray([0]), np.asarray([1])
    candidates = Candidates((mesh,), zero, one, one, zero, zero, zero, remats=("none",))
    variant = OUR_STEP if attention == "ours" else StepVariant(attention="splash")
    found = score(shape_of(config), candidates, sequence_length=length, variant=variant)
    shape = shape_of(config)
    local = shape.layers - shape.global_layers
    keys = shape.global_layers * attended_keys(length, None) + local * attended_keys(
        length, shape.window
    )
    # Two products forward, five backward, which makes the scores again.
    flops = (2 + 5) * 2 * keys * length * shape.heads * shape.head_dim
    chip = target.chip
    peak = chip.per_device(chip.peak("bf16")).value * 1e12
    assert flops / found.step.attention[0] <= peak * (1 + 1e-9)


@pytest.mark.parametrize("name", SLICES)
@pytest.mark.parametrize("head", [64, 128, 256])
@pytest.mark.parametrize(("kernel", "products"), [("fwd", 2), ("dq", 3), ("dkv", 4)])
def test_no_timeline_has_splash_above_the_peak(name, head, kernel, products):
    heads = f"bf16[8,4096,{head}]{{2,1,0}}"
    text = (
        f"HloModule jit_f, is_scheduled=true\n\nENTRY %main (q: {heads}) -> {heads} {{\n"
        f"  %q = {heads} parameter(0)\n  ROOT %splash_mha_{kernel}.1 = {heads} custom-call(%q, "
        '%q, %q), custom_call_target="tpu_custom_call"\n}\n'
    )
    entry = parse_hlo(text).entry
    machine = Machine.of(Slice.parse(name))
    seconds = SplashTimer(machine)(entry.root, entry)
    flops = products * 2 * 8 * 4096 * 4096 * head * 0.5  # causal, by halves where no table says
    assert flops / seconds <= machine.peak_flops("bf16") * (1 + 1e-9)

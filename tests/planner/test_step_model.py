"""The arithmetic step: bounded by what the chip can do, and near published runs."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpukit.compiler.timeline.machine import Machine
from tpukit.hardware import Slice
from tpukit.models import get_preset
from tpukit.planner.cost.attention_time import ATTENTION_BLOCK, visited_keys
from tpukit.planner.cost.candidates import PRECISIONS, REMATS, Candidates, SliceMesh, meshes_on
from tpukit.planner.cost.model_shape import shape_of
from tpukit.planner.cost.scoring import score
from tpukit.planner.cost.step_variant import OUR_STEP, StepVariant, variant_for
from tpukit.planner.cost.torus import place_axes


def scored(
    model,
    slice_name,
    sizes,
    *,
    batch,
    sequence=8192,
    remat="full",
    pieces=1,
    precision="bf16",
    variant=OUR_STEP,
    joined_by="data",
):
    target = Slice.parse(slice_name)
    config = get_preset(model) if isinstance(model, str) else model
    mesh = SliceMesh(target, sizes, place_axes(target, sizes), joined_by)

    def one(value):
        return np.asarray([value])

    candidates = Candidates(
        (mesh,),
        one(0),
        one(batch),
        one(pieces),
        one(0),
        one(PRECISIONS.index(precision)),
        one(0),
        remats=(remat,),
    )
    return score(shape_of(config), candidates, sequence_length=sequence, variant=variant)


# Measured steps of public runs (benchmarks/data/published_results.json says where each is from).
ON_HOST = "offload=decoder_layer_input,qkv_proj"
PUBLISHED = [
    ("llama3.1-8b", "v6e-8", {"fsdp": 8}, 3, f"{ON_HOST},out_proj", 3.443),
    ("llama3.1-8b", "v6e-256", {"fsdp": 256}, 4, f"{ON_HOST},out_proj", 4.55),
    ("llama3.1-70b", "v6e-256", {"fsdp": 256}, 5, ON_HOST, 42.66),
    ("llama3.1-405b", "v5p-1024", {"fsdp": 512}, 2, "offload=attention,mlpwo", 131.47),
    ("llama3.1-70b", "v6e-64", {"fsdp": 64}, 2, ON_HOST, 18.69),
]


@pytest.mark.parametrize(("model", "name", "sizes", "batch", "remat", "measured_s"), PUBLISHED)
def test_a_published_step_is_met_within_10_percent(model, name, sizes, batch, remat, measured_s):
    variant = StepVariant(attention="splash")
    step = scored(model, name, sizes, batch=batch, remat=remat, variant=variant).step_time_s[0]
    assert step == pytest.approx(measured_s, rel=0.10)


@pytest.mark.parametrize("name", ["v5e-16", "v6e-16", "v5p-32", "tpu7x-2x2x2"])
@pytest.mark.parametrize("remat", REMATS)
def test_no_step_beats_the_peak(name, remat):
    target = Slice.parse(name)
    found = scored("llama3.1-8b", name, {"fsdp": target.devices}, batch=4, remat=remat)
    flops = get_preset("llama3.1-8b").flops_per_token(8192).total * found.tokens_per_step[0]
    assert flops / found.step_time_s[0] < target.peak_tflops().value * 1e12


def test_the_causes_add_up_and_each_has_its_reason():
    plain = scored("llama3.1-8b", "v6e-64", {"fsdp": 64}, batch=1)
    assert sum(plain.step.at(0).values()) == pytest.approx(plain.step_time_s[0])
    assert plain.step.dcn[0] == plain.step.bubble[0] == plain.step.host[0] == 0
    assert scored("llama3.1-8b", "2xv6e-256", {"fsdp": 256}, batch=1).step.dcn[0] > 0
    ring = scored("llama3.1-8b", "v6e-64", {"fsdp": 32, "context": 2}, batch=1)
    half = plain.step.attention[0] / 2
    assert half < ring.step.attention[0] < 1.5 * half  # results are joined in every hop
    windows = scored("gemma3-12b", "v6e-64", {"fsdp": 64}, batch=1).step.attention[0]
    split = scored("gemma3-12b", "v6e-64", {"fsdp": 32, "context": 2}, batch=1).step.attention[0]
    assert windows / 2 < split < 1.2 * windows / 2  # of which few layers go round
    # Weights wait for links whatever the batch is, activations the longer the larger it is; with
    # one example the compiler too has less to wait for along tensor (0.25 s, and 0.38 along fsdp).
    split = {"fsdp": 8, "tensor": 8}
    few, many = (scored("llama3.1-8b", "v6e-64", split, batch=batch) for batch in (1, 4))
    assert few.step.ici[0] < plain.step.ici[0] < many.step.ici[0]
    staged = scored("llama3.1-8b", "v6e-64", {"stage": 4, "fsdp": 16}, batch=1, pieces=4)
    busy = staged.step_time_s[0] - staged.step.bubble[0]
    assert staged.step.bubble[0] / busy == pytest.approx(3 / 4, rel=0.02)  # (stages-1)/pieces


def test_recomputing_less_is_faster_and_needs_more():
    kept = [scored("llama3.1-8b", "v6e-64", {"fsdp": 64}, batch=1, remat=name) for name in REMATS]
    *on_device, offload = kept
    assert sorted(on_device, key=lambda one: one.step_time_s[0]) == on_device
    assert sorted(kept, key=lambda one: -one.memory.total[0]) == kept
    assert offload.memory.host[0] > 0


def test_eight_bits_make_the_products_of_layers_faster_and_cost_rounding():
    wide, narrow = (
        scored("llama3.1-70b", "v5e-256", {"fsdp": 256}, batch=1, precision=name)
        for name in ("bf16", "int8")
    )
    head, layers, down = 128_256 * 8192, 80 * 855.6e6, 80 * 234.9e6
    halved = layers + layers + (layers - down)  # forward, to the inputs, and forward again
    everything = halved + layers + 3 * head
    ratio = 1 - halved / 2 / everything
    assert narrow.step.matrix[0] == pytest.approx(wide.step.matrix[0] * ratio, rel=0.01)
    assert narrow.step.attention[0] == wide.step.attention[0]
    assert narrow.step.hbm[0] > wide.step.hbm[0]
    assert narrow.step.ici[0] == pytest.approx(wide.step.ici[0] * 2 / 3, rel=0.03)


def test_rounding_throughout_is_paid_for_and_pays_where_there_is_a_unit_for_it():
    def step(slice_name, matmul):
        return scored(
            "gpt3-175b", slice_name, {"fsdp": 256}, batch=3, sequence=2048, precision="int8",
            variant=variant_for(matmul),
        ).step  # fmt: skip

    for name, faster in (("v6e-256", True), ("v5e-256", False)):
        wide, narrow = step(name, "int8"), step(name, "int8_throughout")
        assert narrow.hbm[0] > wide.hbm[0]  # inputs once more, gradients twice
        # Only v6e has a unit that multiplies int8 over rows faster than bfloat16.
        assert (narrow.matrix[0] < 0.95 * wide.matrix[0]) == faster


def test_gradients_between_slices_travel_beside_the_backward_pass():
    near, far = (
        scored("llama3.1-8b", name, {"fsdp": 256}, batch=4) for name in ("v6e-256", "2xv6e-256")
    )
    waiting = Machine.of(Slice.parse("2xv6e-256")).wait_per_doubling
    alone = far.step_time_s[0] / (1 + waiting)
    assert near.step_time_s[0] < alone < 1.002 * near.step_time_s[0]


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 12).map(lambda n: n * 128), st.integers(1, 2000))
def test_a_window_visits_every_block_that_has_a_key_it_sees(length, window):
    block = math.gcd(length, ATTENTION_BLOCK)
    places = np.arange(length)
    ahead = places[:, None] - places[None, :]
    seen = (ahead >= 0) & (ahead < window)
    blocks = seen.reshape(length // block, block, length // block, block).any((1, 3))
    assert visited_keys(length, window) == pytest.approx(blocks.sum(1).mean() * block)


def test_windows_buffers_scores_and_other_products_cost_what_they_add():
    seconds = {}
    for name, model, variant in (
        ("usual", "gemma3-12b", OUR_STEP),
        ("global", get_preset("gemma3-12b", layer_kinds={}, layer_pattern=""), OUR_STEP),
        ("plain", "gemma3-12b", StepVariant(attention="plain")),
        ("lookup", get_preset("gemma3-12b", embedding_lookup="one_hot"), OUR_STEP),
    ):
        seconds[name] = scored(model, "v6e-64", {"fsdp": 64}, batch=1, variant=variant).step.at(0)
    assert seconds["global"]["attention"] > 1.3 * seconds["usual"]["attention"]
    assert seconds["plain"]["attention"] > seconds["global"]["attention"]
    lookup = seconds["lookup"]["matrix"] - seconds["usual"]["matrix"]
    reached = Machine.of(Slice.parse("v6e-64")).streamed_matrix_efficiency
    flops = 2 * 2 * 262_144 * 3840  # the product and its gradient
    assert lookup == pytest.approx(8192 * flops / (918e12 * reached), rel=0.01)
    dropless, buffers = (
        scored(get_preset("mixtral-8x7b", routing=name), "v6e-64", {"fsdp": 64}, batch=1)
        for name in ("dropless", "capacity")
    )
    # A quarter more rows, against a tile of 512 that each of 7 further experts shares.
    ratio = buffers.step.matrix[0] / dropless.step.matrix[0]
    assert ratio == pytest.approx(1.25 / (1 + 7 * 512 / (2 * 8192)), rel=0.01)
    assert buffers.step.hbm[0] > dropless.step.hbm[0], "rows of the buffers are moved too"


def test_widths_that_do_not_fill_the_lanes_cost_as_if_they_did():
    """64 hidden channels a device take as long as the 128 they are filled up to."""
    few = get_preset("llama3.1-8b", d_ff=1024)  # 64 a device when split 16 ways
    whole = get_preset("llama3.1-8b", d_ff=2048)
    seconds = [
        scored(config, "v6e-16", {"tensor": 16}, batch=1).step.matrix[0] for config in (few, whole)
    ]
    assert seconds[0] == pytest.approx(seconds[1])


def test_slices_that_share_weights_hold_half_and_send_more():
    how = {"batch": 1, "remat": "offload=decoder_layer_input"}
    apart = scored("llama3.1-405b", "2xv6e-256", {"fsdp": 256}, **how)
    shared = scored("llama3.1-405b", "2xv6e-256", {"fsdp": 256}, **how, joined_by="fsdp")
    assert shared.memory.weights[0] == apart.memory.weights[0] / 2
    assert shared.memory.total[0] < apart.memory.total[0]
    assert shared.step.dcn[0] > apart.step.dcn[0]
    assert shared.candidates.examples[0] == apart.candidates.examples[0]


@pytest.mark.parametrize(("model", "shared"), [("llama3.1-405b", True), ("llama3.1-8b", False)])
def test_slices_share_weights_only_where_one_has_too_little_room(model, shared):
    target = Slice.parse("2xv6e-256")
    meshes = list(meshes_on(target, shape_of(get_preset(model)), 8192, pipeline=True))
    assert any(mesh.joined_by == "fsdp" for mesh in meshes) == shared
    for mesh in meshes:
        assert math.prod(mesh.joined_sizes.values()) == target.devices
        assert math.prod(mesh.dcn_mesh) == target.num_slices
        assert mesh.joined_sizes[mesh.joined_by] % 2 == 0

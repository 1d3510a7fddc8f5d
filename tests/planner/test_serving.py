"""`plan_serving`: the smallest slice for weights and cache, and what HBM allows it."""

import io
import math

import jax
import pytest
from rich.console import Console

from tpukit.compiler.timeline.machine import Machine
from tpukit.errors import ConfigError, TPUValidationError
from tpukit.hardware import Slice, get_chip, list_slices
from tpukit.kernels import quantize_weight
from tpukit.models import get_preset
from tpukit.planner.cost import serving_model
from tpukit.planner.cost.model_shape import shape_of
from tpukit.planner.cost.serving_model import (
    Server,
    cache_bytes,
    room_bytes,
    servers_on,
    weight_bytes,
    weight_bytes_read,
)
from tpukit.planner.serving import plan_serving
from tpukit.step import Workload

# llama3.1-70b by hand: 80 layers of q, o (64 heads), k, v (8), gate, up, down and two norms, a
# last norm, and the two tables.
LAYER = 8192 * 128 * (2 * 64 + 2 * 8) + 3 * 8192 * 28672 + 2 * 8192
TABLES = 2 * 128256 * 8192
PARAMETERS_70B = 80 * LAYER + 8192 + TABLES
NORMS = (2 * 80 + 1) * 8192
COLUMNS = 80 * (2 * 8192 + 2 * 1024 + 2 * 28672 + 8192)  # of q, o; k, v; gate, up; down


def shape(name):
    return shape_of(get_preset(name))


def only(plan):
    (choice,) = plan.choices
    return choice


def test_weights_and_cache_by_hand():
    model = shape("llama3.1-70b")
    assert weight_bytes(model, "bf16") == 2 * PARAMETERS_70B
    matrices = PARAMETERS_70B - TABLES - NORMS
    wide = 2 * (TABLES + NORMS)
    assert (
        weight_bytes(model, "int8") == weight_bytes(model, "fp8") == (wide + matrices + 4 * COLUMNS)
    )
    assert weight_bytes(model, "int4") == wide + matrices * 4.25 / 8
    assert cache_bytes(model, 4, 8192) == 80 * 2 * 8 * 128 * 2 * 8192 * 4
    local = shape("gemma3-12b")  # 40 of its 48 layers hold 1024 keys, not more
    assert cache_bytes(local, 1, 8192) == 2 * 8 * 256 * 2 * (8 * 8192 + 40 * 1024)


@pytest.mark.parametrize("format", ["int8", "fp8", "int4"])
@pytest.mark.parametrize("model", [{}, {"n_experts": 4, "experts_per_token": 2}])
def test_weights_take_what_the_quantized_arrays_of_a_model_take(format, model):
    config = get_preset("tiny", **model)
    held = 0
    parameters = Workload(config, batch_size=8, sequence_length=32).state_shapes().params
    for path, leaf in jax.tree_util.tree_leaves_with_path(parameters["layers"]):
        if leaf.ndim < 3 or "router" in str(path):  # layers are stacked
            held += 2 * leaf.size
            continue
        each = jax.ShapeDtypeStruct(leaf.shape[-2:], leaf.dtype)
        narrow = jax.eval_shape(lambda w: quantize_weight(w, format), each)
        held += math.prod(leaf.shape[:-2]) * narrow.nbytes
    outside = jax.tree.leaves({key: parameters[key] for key in parameters if key != "layers"})
    held += sum(2 * leaf.size for leaf in outside)
    assert weight_bytes(shape_of(config), format) == held


def test_formats_go_by_any_name():
    plan = plan_serving("llama3.1-8b", formats=["bfloat16", "float8"], generations=["v6e"])
    assert [one.weights for one in plan.choices] == ["bf16", "fp8"]


def test_a_chip_whose_rates_nobody_published_is_left_out_or_named():
    served = plan_serving("llama3.1-8b", formats=["bf16"])
    assert "v2" not in {one.generation for one in served.choices}
    with pytest.raises(ConfigError, match="v2 cannot be planned for, because its link bandwidth"):
        plan_serving("llama3.1-8b", generations=["v2"])


@pytest.mark.parametrize("generation", ["v5e", "v5p", "v6e"])
def test_the_slice_is_the_smallest_that_holds_it(generation):
    choice = only(plan_serving("llama3.1-70b", formats=["bf16"], generations=[generation]))
    usable = get_chip(generation).hbm_usable_bytes.value
    needed = choice.weight_bytes + choice.cache_bytes
    assert Slice.parse(choice.slice).chips == choice.chips
    assert needed <= 0.9 * usable * choice.chips
    smaller = [one.chips for one in list_slices(generation) if one.chips < choice.chips]
    assert all(needed > 0.9 * usable * chips for chips in smaller)


def test_fewer_bits_need_fewer_chips_and_read_less():
    plan = plan_serving("llama3.1-70b", generations=["v6e"])
    by_format = {choice.weights: choice for choice in plan.choices}
    assert list(by_format) == ["bf16", "int8", "int4", "vq"]
    assert by_format["int4"].chips < by_format["bf16"].chips
    sizes = [choice.weight_bytes for choice in plan.choices]
    assert sizes == sorted(sizes, reverse=True)
    assert plan.smallest.weights == "vq"


def test_decode_is_no_faster_than_a_measured_copy_allows():
    choice = only(plan_serving("llama3.1-8b", formats=["bf16"], generations=["v6e"]))
    assert (choice.chips, choice.tensor, choice.replicas) == (1, 1, 1)
    assert choice.decode.bound_by == "hbm"
    read = choice.weight_bytes + choice.cache_bytes - 2 * 128_256 * 4096
    assert choice.tokens_per_s == pytest.approx(1359.6e9 / read, rel=1e-3)  # tpu-recipes
    many = only(plan_serving("llama3.1-8b", batch=8, formats=["bf16"], generations=["v6e"]))
    assert 1 < many.tokens_per_s / choice.tokens_per_s < 8  # weights are shared, caches are not


@pytest.mark.parametrize(
    ("model", "batch", "context", "on"),
    [("llama3.1-70b", 512, 1024, "v5p"), ("llama3.1-8b", 65_536, 16, "v6e-256")],
)
def test_no_batch_is_decoded_past_the_peak(model, batch, context, on):
    config = get_preset(model)
    weights = config.parameter_count().matmul_active
    asked = {"batch": batch, "context": context, "generations": [on]}
    for choice in plan_serving(model, **asked).choices:
        attended = 2 * config.n_layers * config.n_heads * config.head_dim * context
        flops = choice.tokens_per_s * 2 * (weights + attended)
        peak = Slice.parse(choice.slice).peak_tflops("bf16").value * 1e12
        assert 0.3 * peak < flops < 0.98 * peak  # the matrix units are what it waits for
        prompts = choice.prefill.tokens_per_s * 2 * weights
        assert prompts < 0.98 * peak


def test_llama_70b_on_four_chips_by_hand():
    """512 sequences on v5p-8: products wait for FLOPs, attention for the cache, sums for links."""
    choice = only(
        plan_serving("llama3.1-70b", batch=512, context=1024, formats=["bf16"], generations=["v5p"])
    )
    assert (choice.slice, choice.tensor, choice.replicas) == ("v5p-8", 4, 1)
    products = 2 * (PARAMETERS_70B - TABLES // 2 - NORMS) * 512 / 4 / (459e12 * 0.90 / 0.95)
    cache = 80 * 2 * 8 * 128 * 2 * 1024 * 512 / 4 / (2765e9 * 0.87)
    # 2x2x1 chips, no axis a ring: two links of 90 GB/s a chip; three quarters come from others.
    once = 512 * 8192 * 2 * 3 / 4 / (2 * 90e9) + 2 * 1e-6
    assert choice.decode.flops == pytest.approx(products, rel=1e-6)
    assert choice.decode.hbm == pytest.approx(cache, rel=1e-6)
    assert choice.decode.network == pytest.approx(80 * 2 * 2 * once, rel=1e-6)
    assert choice.tokens_per_s == pytest.approx(512 / choice.decode.seconds)


def test_weights_are_copied_where_that_is_faster_and_there_is_room():
    asked = {"batch": 8192, "context": 64, "formats": ["int8"], "generations": ["v6e-8"]}
    (one,) = plan_serving("llama3.1-8b", **asked).choices
    assert one.tensor * one.replicas == 8
    assert one.replicas > 1
    (large,) = plan_serving("llama3.1-70b", formats=["bf16"], generations=["2xv6e-16"]).choices
    assert large.replicas >= 2  # slices do not share weights


def test_a_mixture_reads_the_experts_that_a_batch_chooses():
    model = shape("mixtral-8x7b")
    table = 2 * 32_000 * 4096  # looked up, and not read whole
    whole, experts = weight_bytes(model, "bf16") - table, 2 * model.expert_parameters
    assert weight_bytes_read(model, "bf16", 1) == pytest.approx(whole - experts * 6 / 8)
    assert weight_bytes_read(model, "bf16", 64) == pytest.approx(whole, rel=1e-6)
    dense = shape("llama3.1-8b")
    assert weight_bytes_read(dense, "bf16", 1) == weight_bytes(dense, "bf16") - 2 * 128_256 * 4096
    tied = shape("llama3.2-1b")  # its table is its head
    assert weight_bytes_read(tied, "bf16", 1) == weight_bytes(tied, "bf16")


def test_what_no_slice_holds_says_what_it_needs():
    plan = plan_serving("llama3.1-8b", batch=100_000, context=131_072, generations=["v6e"])
    assert plan.smallest is None
    for choice in plan.choices:
        assert (choice.slice, choice.chips, choice.tokens_per_s) == (None, None, None)
        assert "needs 1,6" in choice.reason
        assert "largest slice has room for" in choice.reason


def test_it_shows_itself_with_its_origin():
    plan = plan_serving("llama3.1-8b", formats=["bf16", "int4"], generations=["v6e"])
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(plan)
    shown = console.export_text()
    assert "decode" in shown
    assert "reads every weight once for all sequences" in " ".join(shown.split())
    assert "v6e-1" in shown
    assert "1 x tensor=1" in " ".join(shown.split())
    assert {choice["origin"] for choice in plan.to_dict()["choices"]} == {"model"}
    first = plan.to_dict()["choices"][0]
    assert first["slice"] == "v6e-1"
    for name in ("decode", "prefill"):
        assert first[name] == vars(getattr(plan.choices[0], name))
    nowhere = plan_serving("llama3.1-8b", batch=2**20, context=2**17, generations=["v6e"])
    assert nowhere.to_dict()["choices"][0]["decode"] is None
    assert nowhere.to_dict()["choices"][0]["prefill"] is None


def test_wrong_asks_are_refused():
    with pytest.raises(TPUValidationError, match=r"'int5' is no weight format.*mean 'int"):
        plan_serving("tiny", formats=["int5"])
    with pytest.raises(ConfigError, match="batch is 0; accepted are 1 to 1,048,576 sequences"):
        plan_serving("tiny", batch=0)
    with pytest.raises(ConfigError, match="context is 131073; accepted are 1 to 131,072 tokens"):
        plan_serving("llama3.1-8b", context=131_073)


def test_a_slice_by_name_serves_or_says_what_it_lacks():
    small, large = plan_serving(
        "llama3.1-70b", formats=["bf16"], generations=["v6e-4", "v6e-16"]
    ).choices
    assert small.slice is None
    assert small.reason == "needs 134 GiB, it has room for 112"
    assert (large.slice, large.chips) == ("v6e-16", 16)


def served(model, on, *, tensor, weights="bf16", batch=1, context=4096):
    return Server(shape(model), Slice.parse(on), weights, batch, context, tensor)


WEIGHTS_8B = 32 * (4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 14336) + 128_256 * 4096
REACHED = 918e12 * 0.85 / 0.95  # of v6e's peak by products in a step


def test_a_prompt_by_hand():
    server = served("llama3.1-8b", "v6e-8", tensor=8)
    found = server.prefill()
    products = 2 * WEIGHTS_8B * 4096 / 8 / REACHED
    # In two blocks of 2,048 a query meets 3,072 keys in the mean; two products with each.
    pairs = 32 * 3072 * 4096
    reached = 918e12 * Machine.of(server.slice).attention_share(128)
    scores = 2 * 2 * 32 * 128 * pairs / 8 / reached
    assert found.flops == pytest.approx(products + scores)
    assert found.hbm == 0.0
    # 2x4 chips, no ring: two links a chip of 90 GB/s, 1 + 3 hops; two sums in each of 32 layers.
    once = 4096 * 4096 * 2 * 7 / 8 / (2 * 90e9) + 4e-6
    assert found.network == pytest.approx(32 * 2 * 2 * once)
    assert found.tokens == 4096
    assert found.seconds == pytest.approx(found.flops + found.hbm + found.network)
    assert found.network > found.flops
    assert found.bound_by == "network"
    assert served("llama3.1-8b", "v6e-8", tensor=2).prefill().tokens == 4 * 4096


def test_a_prompt_of_local_layers_meets_the_blocks_of_their_window():
    found = served("gemma3-12b", "v6e-1", tensor=1, context=8192).prefill()
    model = shape("gemma3-12b")  # 8 of 48 layers see all; 40 the block of their 1,024 and one more
    pairs = (8 * 5120 + 40 * 3584) * 8192
    reached = 918e12 * Machine.of(Slice.parse("v6e-1")).attention_share(256)
    products = 2 * model.matmul_parameters * 8192 / REACHED
    assert found.flops == pytest.approx(products + 2 * 2 * 16 * 256 * pairs / reached)
    assert found.network == 0.0


def test_a_short_prompt_waits_for_its_weights():
    found = served("llama3.1-8b", "v6e-1", tensor=1, context=16).prefill()
    copied = 1359.6e9  # as fast as a copy was measured
    read = 2 * (WEIGHTS_8B + 65 * 4096)  # with two norms a layer and a last one
    scores = 2 * 2 * 32 * 128 * 32 * 16 * 16
    written = 2 * 2 * 8 * 128 * 32 * 16 / copied
    reached = 918e12 * Machine.of(Slice.parse("v6e-1")).attention_share(128)
    assert written > scores / reached
    assert found.hbm == pytest.approx(read / copied + written, rel=1e-3)
    assert found.flops == 0.0


def test_two_devices_sum_over_the_link_between_them():
    once = 4096 * 2 / 2 / 90e9 + 1e-6
    found = served("llama3.1-8b", "v6e-4", tensor=2).decode().network
    assert found == pytest.approx(32 * 2 * 2 * once)
    assert served("llama3.1-8b", "v6e-4", tensor=1).decode().network == 0


def test_past_the_heads_of_keys_one_more_sum_joins_results():
    within, past = (served("llama3.1-8b", "v6e-16", tensor=n).decode().network for n in (8, 16))
    # 8 of 4x4 chips: two links, 1 + 3 hops; all: two links, 3 + 3 hops.
    once = [4096 * 2 * 7 / 8 / 180e9 + 4e-6, 4096 * 2 * 15 / 16 / 180e9 + 6e-6]
    assert within == pytest.approx(32 * 2 * 2 * once[0])
    assert past == pytest.approx(32 * 3 * 2 * once[1])


def test_the_fullest_replica_is_waited_for():
    nine = served("llama3.1-8b", "v6e-8", tensor=1, batch=9)
    assert (nine.replicas, nine.sequences) == (8, 2)
    assert nine.decode().tokens == 9
    assert (
        nine.decode().seconds == served("llama3.1-8b", "v6e-1", tensor=1, batch=2).decode().seconds
    )
    held = weight_bytes(nine.shape, "bf16") + cache_bytes(nine.shape, 2, 4096)
    assert nine.device_bytes == held
    halves = served("llama3.1-8b", "v6e-8", tensor=2, batch=9)
    held = weight_bytes(nine.shape, "bf16") + cache_bytes(nine.shape, 3, 4096)
    assert halves.device_bytes == held / 2


def test_a_slice_is_split_into_powers_of_two_and_as_a_whole():
    def splits(on):
        ask = {"weights": "int4", "batch": 1, "context": 16}
        return [one.tensor for one in servers_on(Slice.parse(on), shape("tiny"), **ask)]

    assert splits("v6e-8") == [1, 2, 4, 8]
    assert splits("2xv6e-8") == [1, 2, 4, 8]  # replicas do not span slices
    assert splits("v5p:4x4x12") == [1, 2, 4, 8, 16, 32, 64, 192]


def test_nine_tenths_of_a_device_hold_weights_and_cache():
    assert room_bytes(Slice.parse("v6e-8")) == pytest.approx(0.9 * 31.25 * 2**30)
    # 94.75 GiB of a device, which is half of a TPU7x.
    assert room_bytes(Slice.parse("tpu7x-2x2x1")) == pytest.approx(0.9 * 94.75 * 2**30)
    full = served("llama3.1-70b", "v6e-4", tensor=4)
    assert not full.fits
    assert served("llama3.1-70b", "v6e-8", tensor=8).fits


def test_what_fills_a_device_to_the_last_byte_fits(monkeypatch):
    server = served("llama3.1-8b", "v6e-4", tensor=4)
    for more, fits in ((0, True), (-1, False)):
        room = server.device_bytes + more
        monkeypatch.setattr(serving_model, "room_bytes", lambda on, room=room: room)
        assert server.fits == fits


@pytest.mark.parametrize(
    ("on", "stated", "copied"),
    [("v6e-1", 1638e9 * 0.83, 1359.6e9), ("tpu7x-1x1x1", 7380e9 / 2 * 0.87, 6420.96e9 / 2)],
)
def test_serving_reads_no_faster_than_ops_and_no_faster_than_a_copy(on, stated, copied):
    """By tpu-recipes a copy reached the same within a thousandth; the slower of both counts."""
    found = served("llama3.1-8b", on, tensor=1).decode()
    read = 2 * (WEIGHTS_8B + 65 * 4096) + 2 * 2 * 8 * 128 * 32 * 4096
    assert read / found.hbm <= min(stated, copied) * (1 + 1e-9)
    assert read / found.hbm == pytest.approx(stated, rel=1e-3)


def test_without_a_measured_copy_serving_streams_as_ops_do():
    found = served("llama3.1-8b", "v5p-8", tensor=1).decode()
    read = 2 * (WEIGHTS_8B + 65 * 4096) + 2 * 2 * 8 * 128 * 32 * 4096
    assert found.hbm == pytest.approx(read / (2765e9 * 0.87), rel=1e-6)


def test_the_smallest_is_the_fastest_of_those_with_the_fewest_chips():
    plan = plan_serving("llama3.1-8b", formats=["bf16", "int4"], generations=["v6e-1", "v6e-4"])
    assert {one.chips for one in plan.choices} == {1, 4}
    assert plan.smallest.chips == 1
    assert plan.smallest.weights == "int4"


def test_as_many_sequences_as_are_accepted_are_asked_for():
    with pytest.raises(ConfigError, match="batch is 1048577; accepted are 1 to 1,048,576"):
        plan_serving("tiny", batch=2**20 + 1)
    usual = plan_serving("llama3.1-8b", generations=["v6e-1"])
    assert (usual.batch, usual.context) == (1, 8192)

"""`plan_serving`: the smallest slice for weights and cache, and what it serves."""

import io

import pytest
from rich.console import Console

from tpukit.errors import ConfigError, TPUValidationError
from tpukit.hardware import Slice, get_chip, list_slices
from tpukit.models import get_preset, list_presets
from tpukit.planner.serving import plan_serving


def only(plan):
    (choice,) = plan.choices
    return choice


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
    read = choice.weight_bytes + choice.cache_bytes * 0.75 - 2 * 128_256 * 4096
    assert choice.tokens_per_s < 1359.6e9 / read  # tpu-recipes
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
        attended = 2 * config.n_layers * config.n_heads * config.head_dim * context * 0.75
        flops = choice.decode.tokens_per_s * 2 * (weights + attended)
        peak = Slice.parse(choice.slice).peak_tflops("bf16").value * 1e12
        assert 0.25 * peak < flops < 0.98 * peak  # the matrix units are what it waits for
        assert choice.prefill.tokens_per_s * 2 * weights < 0.98 * peak


def test_lengths_follow_from_each_other():
    def lengths(**asked):
        found = plan_serving("llama3.1-8b", formats=["bf16"], generations=["v6e-1"], **asked)
        return found.traffic.prompt, found.traffic.new

    assert lengths() == (4096, 4096)
    assert lengths(context=101) == (51, 50)
    assert lengths(context=100, new_tokens=30) == (70, 30)
    assert lengths(context=100, prompt_tokens=30) == (30, 70)
    assert lengths(prompt_tokens=1024, new_tokens=512) == (1024, 512)
    assert lengths(context=100, prompt_tokens=40, new_tokens=60) == (40, 60)
    assert lengths(prompt_tokens=8000) == (8000, 192)
    with pytest.raises(ConfigError, match="prompt of 40 and 50 new tokens are not the context of"):
        lengths(context=100, prompt_tokens=40, new_tokens=50)
    with pytest.raises(ConfigError, match="a prompt of 100 and 0 new tokens"):
        lengths(context=100, prompt_tokens=100)
    with pytest.raises(ConfigError, match="new_tokens is 0; accepted are 1 to 131,071 tokens"):
        lengths(new_tokens=0)
    with pytest.raises(ConfigError, match="context is 200000; accepted are 2 to 131,072"):
        lengths(prompt_tokens=100_000, new_tokens=100_000)


def test_prompts_of_others_are_between_the_tokens_of_an_answer():
    one = only(
        plan_serving(
            "llama3.1-8b",
            batch=16,
            prompt_tokens=1000,
            new_tokens=500,
            formats=["bf16"],
            generations=["v6e-1"],
        )
    )
    decode, prompt = one.decode.seconds, one.prefill.seconds
    assert one.first_token_time.value == prompt
    assert one.token_time.value == pytest.approx(decode + 16 * prompt / 500)
    # In the time of one answer every request reads its prompt once.
    assert one.tokens_per_s == pytest.approx(16 * 500 / (500 * decode + 16 * prompt))
    assert one.tokens_per_s_per_chip == one.tokens_per_s


def test_a_cache_in_fp8_takes_half_and_serves_more():
    asked = {"batch": 64, "formats": ["fp8"], "generations": ["tpu7x-1x1x1"]}
    wide, narrow = (only(plan_serving("qwen3-32b", cache=c, **asked)) for c in ("bf16", "fp8"))
    assert 2 * narrow.cache_bytes == wide.cache_bytes
    assert narrow.tokens_per_s > wide.tokens_per_s
    assert wide.room_for * 2 <= narrow.room_for <= wide.room_for * 2 + 1
    assert narrow.to_dict()["cache"] == "fp8"


def test_narrow_activations_are_faster_where_the_chip_multiplies_them():
    def first_ms(on, weights, activations):
        found = plan_serving(
            "qwen3-32b", formats=[weights], activations=activations, generations=[on]
        )
        return only(found).prefill.seconds, only(found).multiplied

    wide, _ = first_ms("tpu7x-1x1x1", "fp8", "bf16")
    narrow, multiplied = first_ms("tpu7x-1x1x1", "fp8", "fp8")
    assert (multiplied, narrow < wide) == ("fp8", True)
    assert first_ms("tpu7x-1x1x1", "int4", "fp8") == (wide, "bf16")  # its weights are widened
    assert first_ms("tpu7x-1x1x1", "int8", "int8") == (wide, "bf16")  # 7x has no integer products
    eight, multiplied = first_ms("v6e-4", "int8", "int8")
    assert (multiplied, eight < first_ms("v6e-4", "int8", "bf16")[0]) == ("int8", True)
    assert first_ms("v6e-4", "fp8", "fp8")[1] == "bf16"


@pytest.mark.parametrize("name", list_presets())
def test_every_preset_is_served(name):
    config = get_preset(name)
    found = plan_serving(
        name, batch=4, context=min(4096, config.max_seq_len), cache="fp8", formats=["bf16", "int4"]
    )
    assert found.smallest.tokens_per_s > 0
    assert all(one.tokens_per_s or one.reason for one in found.choices)


def test_weights_are_copied_where_that_is_faster_and_there_is_room():
    asked = {"batch": 8192, "context": 64, "formats": ["int8"], "generations": ["v6e-8"]}
    (one,) = plan_serving("llama3.1-8b", **asked).choices
    assert one.tensor * one.replicas == 8
    assert one.replicas > 1
    (large,) = plan_serving("llama3.1-70b", formats=["bf16"], generations=["2xv6e-16"]).choices
    assert large.replicas >= 2  # slices do not share weights


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
    assert "1 x 1" in shown
    assert "1 request of 4,096 + 4,096 tokens, cache in bf16" in " ".join(shown.split())
    assert {choice["origin"] for choice in plan.to_dict()["choices"]} == {"model"}
    first = plan.to_dict()["choices"][0]
    assert first["slice"] == "v6e-1"
    for name in ("decode", "prefill"):
        assert first[name] == vars(getattr(plan.choices[0], name))
    nowhere = plan_serving("llama3.1-8b", batch=2**20, context=2**17, generations=["v6e"])
    assert nowhere.to_dict()["choices"][0]["decode"] is None
    assert nowhere.to_dict()["choices"][0]["prefill"] is None
    console.print(nowhere)
    assert "bf16 on v6e: needs" in console.export_text()


def test_wrong_asks_are_refused():
    with pytest.raises(TPUValidationError, match=r"'int5' is no weight format.*mean 'int"):
        plan_serving("tiny", formats=["int5"])
    with pytest.raises(ConfigError, match="batch is 0; accepted are 1 to 1,048,576 sequences"):
        plan_serving("tiny", batch=0)
    with pytest.raises(ConfigError, match="context is 131073; accepted are 2 to 131,072 tokens"):
        plan_serving("llama3.1-8b", context=131_073)
    with pytest.raises(TPUValidationError, match="'int5' is not a cache format; use bf16, fp8"):
        plan_serving("tiny", cache="int5")
    with pytest.raises(TPUValidationError, match="'vq' is no activation format"):
        plan_serving("tiny", activations="vq")


def test_a_slice_by_name_serves_or_says_what_it_lacks():
    small, large = plan_serving(
        "llama3.1-70b", formats=["bf16"], generations=["v6e-4", "v6e-16"]
    ).choices
    assert small.slice is None
    assert small.reason == "needs 134 GiB, it has room for 112"
    assert (large.slice, large.chips) == ("v6e-16", 16)


def test_the_smallest_is_the_fastest_of_those_with_the_fewest_chips():
    plan = plan_serving("llama3.1-8b", formats=["bf16", "int4"], generations=["v6e-1", "v6e-4"])
    assert {one.chips for one in plan.choices} == {1, 4}
    assert plan.smallest.chips == 1
    assert plan.smallest.weights == "int4"


def test_as_many_sequences_as_are_accepted_are_asked_for():
    with pytest.raises(ConfigError, match="batch is 1048577; accepted are 1 to 1,048,576"):
        plan_serving("tiny", batch=2**20 + 1)
    usual = plan_serving("llama3.1-8b", generations=["v6e-1"])
    assert (usual.traffic.batch, usual.traffic.context) == (1, 8192)

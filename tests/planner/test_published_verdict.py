"""What chips make of published checkpoints: by the catalog, the format and the serving plan."""

import io
import json

import numpy as np
import published_weights as truth
import pytest

from tpukit.errors import TPUModelError
from tpukit.hardware import get_chip
from tpukit.planner.published_verdict import quantization_verdict
from tpukit.planner.serving import plan_serving

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "head_dim": 128,
    "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 128256, "rms_norm_eps": 1e-5, "max_position_embeddings": 8192,
    "rope_theta": 5e5, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip


def w8a8(kind):
    eight = {"num_bits": 8, "type": kind, "strategy": "channel", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized" if kind == "int" else "float-quantized",
        "config_groups": {"group_0": {"weights": eight, "input_activations": eight}},
    }


PUBLISHED = {
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "int4", "eee"),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 128}, "bf16", "eee"),
    "int8": (w8a8("int"), "int8", "nne"),
    "fp8": (w8a8("float"), "fp8", "een"),
    "fp8 block": ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "bf16", "eee"),
    "mxfp4": ({"quant_method": "mxfp4"}, "bf16", "eee"),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True,
             "bnb_4bit_quant_type": "nf4"}, "bf16", "eee"),
    "llm.int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8", "nne"),
}  # fmt: skip


def config(tmp_path, settings, **changes):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, **changes, "quantization_config": settings}))
    return path


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_published_format_on_three_chips(name, tmp_path):
    settings, held, answers = PUBLISHED[name]
    path = config(tmp_path, settings)
    verdict = quantization_verdict(path, on=("v5e", "v6e", "7x"))
    assert "".join(one.answer[0] for one in verdict.chips) == answers
    for one in verdict.chips:
        assert one.held == held
        [planned] = plan_serving(str(path), formats=[held], generations=[one.on]).choices
        assert one.serving == planned
        assert one.serving.served.origin == "model"
        native = get_chip(one.on).multiplies(
            verdict.scheme.activations, "int8" if held == "int8" else "float8_e4m3fn"
        )
        assert (one.answer == "native") == (native and held in ("int8", "fp8"))
        if one.held == "bf16":
            assert one.way_out
            assert one.better.weight_bytes < one.serving.weight_bytes
    json.dumps(verdict.to_dict())


def test_bytes_of_a_config_are_those_of_the_format(tmp_path):
    verdict = quantization_verdict(config(tmp_path, PUBLISHED["awq"][0]))
    # 32 layers of 218,103,808 weights in 4 bits, 16 + 4 for every 128; the rest in 16.
    narrow, whole = 32 * 218_103_808, 8_030_261_248
    assert verdict.stored.value == narrow * (4 + 20 / 128) / 8 + (whole - narrow) * 2
    assert verdict.stored.origin == "model"


def test_bytes_of_a_folder_are_those_of_its_files(tmp_path):
    path = config(tmp_path, PUBLISHED["gptq"][0])
    tensors, _ = truth.gptq(np.random.default_rng(0), 16, 128)
    truth.save(tmp_path / "model.safetensors", tensors)
    stored = quantization_verdict(tmp_path).stored
    assert (stored.value, stored.origin) == (sum(t.nbytes for t in tensors.values()), "measured")
    assert path.exists()


def test_what_fits_no_slice_is_refused_with_the_size(tmp_path):
    path = config(tmp_path, PUBLISHED["awq"][0])
    [one] = quantization_verdict(path, on=("v6e-1",), batch=512).chips
    assert one.answer == "refused"
    assert "room for" in one.why


def test_plain_weights_have_no_verdict(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    with pytest.raises(TPUModelError, match="not quantized"):
        quantization_verdict(tmp_path)


def test_it_prints_itself(tmp_path):
    from rich.console import Console

    console = Console(width=200, record=True, file=io.StringIO())
    console.print(quantization_verdict(config(tmp_path, PUBLISHED["fp8"][0])))
    text = console.export_text()
    for word in ("v5e", "emulated", "native", "compressed-tensors", "held as"):
        assert word in text

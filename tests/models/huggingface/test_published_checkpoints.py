"""Whole checkpoints that are published quantized become the model transformers makes of them."""

import json

import jax
import numpy as np
import published_weights as truth
import pytest
from safetensors.numpy import load_file

from tpukit.errors import TPUModelError
from tpukit.models import export_huggingface, import_huggingface
from tpukit.models.transformer.config import TransformerConfig

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 32, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64, "rope_theta": 1000.0, "hidden_act": "silu",
    "tie_word_embeddings": False,
}  # fmt: skip
GPT_OSS = {
    **LLAMA, "model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2,
    "sliding_window": 8, "head_dim": 16,
}  # fmt: skip
MAKERS = {
    "gptq": (
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False},
        lambda rng, *shape: truth.gptq(rng, *shape, group=32, symmetric=False),
    ),
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 32},
        lambda rng, *shape: truth.awq(rng, *shape, group=32),
    ),
    "fp8": (
        {"quant_method": "fp8", "weight_block_size": [48, 48]},
        lambda rng, *shape: truth.block_fp8(rng, *shape, block=(48, 48)),
    ),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
            truth.nf4),
}  # fmt: skip


def dense_checkpoint(config, folder):
    """A checkpoint of random numbers as this package writes it, and its tensors."""
    ours = TransformerConfig.from_huggingface(config)
    rng = np.random.default_rng(0)
    params = {}
    for path, shape in ours.parameter_shapes().items():
        *parents, leaf = path.split("/")
        tree = params
        for word in parents:
            tree = tree.setdefault(word, {})
        tree[leaf] = rng.normal(0, 0.1, shape).astype(np.float32)
    export_huggingface(params, ours, folder)
    return load_file(folder / "model.safetensors")


def write(folder, config, tensors):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    truth.save(folder / "model.safetensors", tensors)


def both(tmp_path, config, quantization, dense, quantized):
    write(tmp_path / "dense", config, dense)
    write(tmp_path / "quantized", {**config, "quantization_config": quantization}, quantized)
    return (import_huggingface(tmp_path / one).params for one in ("dense", "quantized"))


@pytest.mark.parametrize("kind", MAKERS)
def test_linear_layers(kind, tmp_path):
    settings, make = MAKERS[kind]
    dense = dense_checkpoint(LLAMA, tmp_path / "first")
    quantized = dict(dense)
    rng = np.random.default_rng(3)
    for name in [name for name in dense if "_proj." in name]:
        tensors, matrix = make(rng, *dense[name].shape)
        del quantized[name]
        quantized |= truth.named(name.removesuffix("weight"), tensors)
        dense[name] = matrix.astype("bfloat16")
    expected, found = both(tmp_path, LLAMA, settings, dense, quantized)
    jax.tree.map(np.testing.assert_array_equal, expected, found)
    assert found["layers"]["mlp"]["down_proj"]["kernel"].dtype == "bfloat16"


def test_gpt_oss_as_it_is_published(tmp_path):
    torch = pytest.importorskip("torch")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    dense = dense_checkpoint(GPT_OSS, tmp_path / "first")
    quantized = dict(dense)
    rng = np.random.default_rng(3)
    names = [name for name in dense if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]
    assert len(names) == 4
    for name in names:
        experts, inputs, outputs = dense[name].shape
        tensors, _ = truth.mxfp4(rng, experts, outputs, inputs)
        del quantized[name]
        quantized |= truth.named(name, tensors)
        theirs = convert_moe_packed_tensors(*map(torch.from_numpy, tensors.values()))
        dense[name] = theirs.float().numpy().astype("bfloat16")
    expected, found = both(tmp_path, GPT_OSS, {"quant_method": "mxfp4"}, dense, quantized)
    jax.tree.map(np.testing.assert_array_equal, expected, found)


def test_deepseek_as_it_is_published(tmp_path):
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from huggingface_models import make_model
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    make_model("deepseek_v3").save_pretrained(tmp_path / "first")
    config = json.loads((tmp_path / "first/config.json").read_text())
    dense = load_file(tmp_path / "first/model.safetensors")
    quantized = dict(dense)
    rng = np.random.default_rng(3)
    for name in [name for name in dense if "_proj" in name and dense[name].ndim == 2]:
        tensors, _ = truth.block_fp8(rng, *dense[name].shape, block=(4, 4))
        quantized |= truth.named(name.removesuffix("weight"), tensors)
        values = torch.from_numpy(tensors["weight"].view(np.uint8)).view(torch.float8_e4m3fn)
        scales = torch.from_numpy(tensors["weight_scale_inv"])
        theirs = Fp8Dequantize(None)._dequantize_one(values, scales, torch.float32)
        dense[name] = theirs.numpy().astype("bfloat16")
    settings = {"quant_method": "fp8", "weight_block_size": [4, 4]}
    config["dtype"] = "bfloat16"
    expected, found = both(tmp_path, config, settings, dense, quantized)
    jax.tree.map(np.testing.assert_array_equal, expected, found)


def test_a_part_that_is_missing_is_named(tmp_path):
    settings, make = MAKERS["awq"]
    dense = dense_checkpoint(LLAMA, tmp_path / "first")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors, _ = make(np.random.default_rng(0), *dense.pop(name).shape)
    del tensors["qzeros"]
    dense |= truth.named(name.removesuffix("weight"), tensors)
    write(tmp_path / "cut", {**LLAMA, "quantization_config": settings}, dense)
    with pytest.raises(TPUModelError, match=r"up_proj\.qzeros"):
        import_huggingface(tmp_path / "cut")


@pytest.mark.parametrize("at", range(0, 400, 37))
def test_a_damaged_file_is_an_error_or_a_model(tmp_path, at):
    """Bytes of the header turned: refused with a sentence, or (a name only) something missing."""
    settings, make = MAKERS["fp8"]
    dense = dense_checkpoint(LLAMA, tmp_path / "first")
    name = "model.layers.1.mlp.up_proj.weight"
    dense |= truth.named(
        name.removesuffix("weight"), make(np.random.default_rng(0), *dense[name].shape)[0]
    )
    write(tmp_path / "bad", {**LLAMA, "quantization_config": settings}, dense)
    file = tmp_path / "bad/model.safetensors"
    raw = bytearray(file.read_bytes())
    raw[at] ^= 0x15
    file.write_bytes(raw)
    try:
        import_huggingface(tmp_path / "bad")
    except TPUModelError as error:
        seen = str(error)
        assert seen

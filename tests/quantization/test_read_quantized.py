"""Published weights in our formats: to the bit where a format holds them, or it says why not."""

import json

import jax.numpy as jnp
import numpy as np
import published_weights as truth
import pytest

from tpukit.errors import TPUModelError
from tpukit.kernels.ops.quantized_matmul.weight import QuantizedWeight, dequantize
from tpukit.quantization import read_quantized
from tpukit.quantization.published import held_as, load_weight

NAME = "model.layers.0.mlp.up_proj.weight"
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
ROWS_FP8 = {"quant_method": "fbgemm_fp8"}
INT8 = {"quant_method": "bitsandbytes", "load_in_8bit": True}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}


def checkpoint(folder, settings, tensors):
    (folder / "config.json").write_text(json.dumps({"quantization_config": settings}))
    truth.save(folder / "model.safetensors", truth.named(NAME.removesuffix("weight"), tensors))
    return read_quantized(folder)


def rows_fp8(rng, outputs, inputs):
    tensors, _ = truth.block_fp8(rng, outputs, inputs, block=(1, inputs))
    values, scales = tensors["weight"], tensors["weight_scale_inv"]
    return {"weight": values, "weight_scale": scales}, values.astype(np.float64) * scales


CASES = {
    "gptq": (GPTQ, lambda rng: truth.gptq(rng, 24, 256), "int4"),
    "gptq of other groups": (
        {**GPTQ, "group_size": 64}, lambda rng: truth.gptq(rng, 24, 256, group=64), "float32"),
    "gptq with zero points": (
        {**GPTQ, "sym": False}, lambda rng: truth.gptq(rng, 24, 256, symmetric=False), "float32"),
    "gptq in eight bits": (
        {**GPTQ, "bits": 8, "group_size": -1},
        lambda rng: truth.gptq(rng, 24, 256, bits=8, group=256), "int8"),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 128},
            lambda rng: truth.awq(rng, 24, 256), "float32"),
    "fp8 by rows": (ROWS_FP8, lambda rng: rows_fp8(rng, 24, 256), "fp8"),
    "int8 by rows": (INT8, lambda rng: truth.int8_rows(rng, 24, 256), "int8"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_numbers_are_those_published(case, tmp_path):
    settings, make, held = CASES[case]
    tensors, matrix = make(np.random.default_rng(5))
    with checkpoint(tmp_path, settings, tensors) as opened:
        assert opened.names == (NAME,)
        loaded = opened.load(NAME)
    assert loaded.held == held
    assert loaded.exact
    assert bool(loaded.reason) == isinstance(loaded.weight, np.ndarray)
    if isinstance(loaded.weight, QuantizedWeight):
        # In float32 every product of a narrow value and its scale is rounded once, here and there.
        found = np.asarray(dequantize(loaded.weight, jnp.float32)).T
        np.testing.assert_array_equal(found, matrix.astype(np.float32))
        assert loaded.nbytes < matrix.size * 2
        assert held_as(opened.scheme) == (held, "")
    else:
        np.testing.assert_array_equal(loaded.weight.astype(np.float64), matrix)
        assert held_as(opened.scheme)[0] == "bf16"


def test_what_no_float_holds_exactly_says_so(tmp_path):
    tensors, matrix = truth.block_fp8(np.random.default_rng(5), 150, 256)
    loaded = checkpoint(tmp_path, FP8, tensors).load(NAME)
    assert (loaded.held, loaded.exact) == ("float32", False)
    np.testing.assert_array_equal(loaded.weight, matrix.astype(np.float32))
    assert "inside the sum" in loaded.reason


def test_scales_that_are_powers_of_two_lose_nothing_in_bfloat16(tmp_path):
    tensors, _ = truth.block_fp8(np.random.default_rng(5), 150, 256)
    tensors["weight_scale_inv"] = np.exp2(np.floor(np.log2(tensors["weight_scale_inv"])))
    loaded = checkpoint(tmp_path, FP8, tensors).load(NAME)
    assert (loaded.held, loaded.exact) == ("bfloat16", True)


def test_nf4_is_read_as_numbers(tmp_path):
    tensors, matrix = truth.nf4(np.random.default_rng(5), 16, 128)
    opened = checkpoint(tmp_path, NF4, tensors)
    loaded = opened.load(NAME)
    np.testing.assert_allclose(loaded.weight, matrix, rtol=1e-6)
    assert "table" in loaded.reason
    shown = opened.to_dict()
    assert shown["quantized"] == 1
    assert shown["bytes"] == sum(one.nbytes for one in tensors.values())


def test_a_reader_is_not_for_plain_weights(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(TPUModelError, match="not quantized"):
        read_quantized(tmp_path)


def test_a_name_that_is_not_quantized(tmp_path):
    tensors, _ = truth.gptq(np.random.default_rng(5), 24, 256)
    opened = checkpoint(tmp_path, GPTQ, tensors)
    with pytest.raises(TPUModelError, match="up_proj"):
        opened.load("model.norm.weight")
    assert len(list(opened)) == 1
    assert load_weight(opened.published(NAME)).held == "int4"

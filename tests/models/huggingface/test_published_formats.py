"""Published quantized weights: every format against its definition and against its own library."""

from pathlib import Path

import numpy as np
import published_weights as truth
import pytest
from safetensors.numpy import load_file

from tpukit.errors import TPUModelError
from tpukit.models.huggingface.published.reading import FORMATS, quantization_of

GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": True}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
NAME = "model.layers.0.self_attn.q_proj.weight"
BASE = NAME.removesuffix("weight")


def read(config, tensors, name=NAME):
    found = quantization_of({"quantization_config": config})
    assert found is not None
    assert found.holds(name, tensors)
    assert found.names(tensors) == [name]
    return found.read(name, tensors)


def compressed(bits=4, strategy="group", form="pack-quantized", **weights):
    group = {"num_bits": bits, "type": "int", "strategy": strategy, "symmetric": True, **weights}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": group}},
    }


@pytest.fixture
def rng():
    return np.random.default_rng(7)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("version", [1, 2])
def test_gptq(rng, bits, symmetric, version):
    tensors, matrix = truth.gptq(
        rng, 32, 96, bits=bits, group=32, symmetric=symmetric, version=version
    )
    kind = {} if version == 1 else {"checkpoint_format": "gptq_v2"}
    config = {**GPTQ, "bits": bits, "group_size": 32, "sym": symmetric, **kind}
    weight = read(config, truth.named(BASE, tensors))
    np.testing.assert_array_equal(weight.dequantize(np.float64), matrix)
    assert weight.exact == np.float32


def test_gptq_whose_groups_are_of_inputs_that_are_no_neighbours(rng):
    order = rng.permutation(np.arange(256) // 64)
    tensors, matrix = truth.gptq(rng, 16, 256, group=64, symmetric=False, order=order)
    weight = read({**GPTQ, "group_size": 64, "desc_act": True}, truth.named(BASE, tensors))
    np.testing.assert_array_equal(weight.dequantize(np.float64), matrix)


def test_awq(rng):
    tensors, matrix = truth.awq(rng, 40, 256)
    weight = read(AWQ, truth.named(BASE, tensors))
    np.testing.assert_array_equal(weight.dequantize(np.float64), matrix)


@pytest.mark.parametrize("shape", [(256, 384), (200, 130), (64, 64)])
def test_block_fp8(rng, shape):
    tensors, matrix = truth.block_fp8(rng, *shape)
    weight = read(FP8, truth.named(BASE, tensors))
    np.testing.assert_array_equal(weight.dequantize(np.float64), matrix)


def test_block_fp8_is_what_transformers_makes_of_it(rng):
    torch = pytest.importorskip("torch")
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    tensors, _ = truth.block_fp8(rng, 256, 384)
    theirs = Fp8Dequantize(None)._dequantize_one(
        torch.from_numpy(tensors["weight"].view(np.uint8)).view(torch.float8_e4m3fn),
        torch.from_numpy(tensors["weight_scale_inv"]),
        output_dtype=torch.float32,
    )
    weight = read(FP8, truth.named(BASE, tensors))
    np.testing.assert_array_equal(weight.dequantize(np.float32), theirs.numpy())


def test_mxfp4_is_what_transformers_makes_of_it(rng):
    torch = pytest.importorskip("torch")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    tensors, matrix = truth.mxfp4(rng, 3, 8, 64)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    weight = read({"quant_method": "mxfp4"}, truth.named(name, tensors), name)
    assert weight.exact.name == "bfloat16"
    found = weight.dequantize()
    np.testing.assert_array_equal(found.astype(np.float64), matrix)
    theirs = convert_moe_packed_tensors(
        torch.from_numpy(tensors["_blocks"]), torch.from_numpy(tensors["_scales"])
    )
    assert found.shape == weight.shape == tuple(theirs.shape)
    np.testing.assert_array_equal(found.astype(np.float32), theirs.float().numpy())


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("shape", [(8, 128), (6, 96), (130, 256)])
def test_nf4(rng, nested, shape):
    tensors, matrix = truth.nf4(rng, *shape, nested=nested)
    weight = read(BNB, truth.named(BASE, tensors))
    np.testing.assert_allclose(weight.dequantize(np.float64), matrix, rtol=1e-7)


@pytest.mark.parametrize("kind", ["nf4", "fp4", "int8"])
def test_what_bitsandbytes_itself_wrote(kind):
    """Tensors and numbers of bitsandbytes 0.50.2, kept in a file: the library is large."""
    kept = load_file(Path(__file__).parent / "data/bitsandbytes.safetensors")
    tensors = truth.Tensors({name: one for name, one in kept.items() if name.startswith(kind)})
    expected = tensors.pop(f"{kind}.expected")
    settings = {"load_in_8bit": True} if kind == "int8" else {"bnb_4bit_quant_type": kind}
    weight = read({"quant_method": "bitsandbytes", **settings}, tensors, f"{kind}.weight")
    # In eight bits it multiplies with a rounded 1 / 127.
    np.testing.assert_allclose(
        weight.dequantize(np.float32), expected, rtol=2e-7 if kind == "int8" else 0
    )


def test_bitsandbytes_in_eight_bits(rng):
    tensors, matrix = truth.int8_rows(rng, 12, 40)
    weight = read(
        {"quant_method": "bitsandbytes", "load_in_8bit": True}, truth.named(BASE, tensors)
    )
    np.testing.assert_array_equal(weight.dequantize(np.float64), matrix)


@pytest.mark.parametrize(
    ("bits", "form", "args"),
    [
        (4, "pack-quantized", {"strategy": "group", "group_size": 32}),
        (4, "pack-quantized", {"strategy": "group", "group_size": 32, "symmetric": False}),
        (8, "pack-quantized", {"strategy": "channel"}),
        (3, "pack-quantized", {"strategy": "channel"}),
        (8, "int-quantized", {"strategy": "channel"}),
        (8, "int-quantized", {"strategy": "channel", "symmetric": False}),
        (8, "float-quantized", {"strategy": "channel", "type": "float"}),
        (8, "float-quantized", {"strategy": "tensor", "type": "float"}),
        (8, "float-quantized", {"strategy": "block", "type": "float", "block_structure": [16, 32]}),
        (4, "mxfp4-pack-quantized", {"strategy": "group", "type": "float", "group_size": 32}),
    ],
)
def test_compressed_tensors_is_what_its_library_makes_of_it(rng, bits, form, args):
    torch = pytest.importorskip("torch")
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.base import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    config = compressed(bits, form=form, **args)
    settings = QuantizationArgs(**config["config_groups"]["group_0"]["weights"])
    scheme = QuantizationScheme(targets=["Linear"], weights=settings)
    rows, columns = 32, 96
    grid = {
        "group": (rows, columns // 32), "channel": (rows, 1), "tensor": (1,), "block": (2, 3)
    }[args["strategy"]]  # fmt: skip
    numbers = torch.from_numpy(rng.normal(0, 0.02, (rows, columns))).to(torch.bfloat16)
    scales = torch.from_numpy(rng.uniform(0.004, 0.006, grid)).to(torch.bfloat16)
    if form.startswith("mx"):
        scales = torch.exp2(torch.floor(torch.log2(scales)))
    state = {"weight": numbers, "weight_scale": scales}
    if not settings.symmetric:
        zeros = rng.integers(-(2 ** (bits - 1)), 2 ** (bits - 1), grid).astype(np.int8)
        state["weight_zero_point"] = torch.from_numpy(zeros)
    library = BaseCompressor.get_value_from_registry(form)
    stored = library.compress(state, scheme)
    expected = library.decompress(dict(stored), scheme)["weight"]

    def in_numpy(tensor):
        if tensor.dtype == torch.bfloat16:
            return tensor.float().numpy()
        if tensor.dtype == torch.float8_e4m3fn:
            return tensor.view(torch.uint8).numpy().view("float8_e4m3fn")
        return tensor.numpy()

    tensors = truth.named(BASE, {name: in_numpy(one) for name, one in stored.items()})
    weight = read(config, tensors)
    found = torch.from_numpy(weight.dequantize(np.float32)).to(expected.dtype)
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"quant_method": "gptk"}, "gptq"),
        ({"quant_method": "aqlm"}, "is not supported"),
        ({**GPTQ, "bits": 5}, "bits=5"),
        ({**GPTQ, "checkpoint_format": "marlin"}, "marlin"),
        ({**GPTQ, "group_size": "many"}, "group_size='many'"),
        ({**AWQ, "version": "gemv"}, "gemv"),
        ({**FP8, "weight_block_size": [128]}, "weight_block_size"),
        ({"quant_method": "compressed-tensors", "format": "sparse-24"}, "not supported"),
        ({"quant_method": "compressed-tensors", "config_groups": 3}, "is invalid"),
        (compressed(4, type="float", form="nvfp4-pack-quantized"), "nvfp4"),
        ({**BNB, "bnb_4bit_quant_type": "nf5"}, "nf5"),
        ("gptq", "expected an object"),
    ],
)
def test_configurations_that_are_not_read(config, words):
    with pytest.raises(TPUModelError, match=words):
        quantization_of({"quantization_config": config})


def test_weights_that_are_not_quantized():
    assert quantization_of({"model_type": "llama"}) is None


CASES = {
    "gptq": (GPTQ, lambda rng: truth.gptq(rng, 16, 128)[0]),
    "awq": (AWQ, lambda rng: truth.awq(rng, 16, 128)[0]),
    "fp8": (FP8, lambda rng: truth.block_fp8(rng, 16, 128)[0]),
    "nf4": (BNB, lambda rng: truth.nf4(rng, 16, 128)[0]),
}


@pytest.mark.parametrize("case", CASES)
def test_damaged_tensors_are_an_error_or_numbers_never_a_crash(case):
    """Every tensor in turn lost, cut, of another kind or full of noise."""
    config, make = CASES[case]
    errors = 0
    for seed in range(40):
        rng = np.random.default_rng(seed)
        tensors = truth.named(BASE, make(rng))
        victim = list(tensors)[seed % len(tensors)]
        one = tensors[victim]
        harm = seed // len(tensors) % 5
        if harm == 0:
            del tensors[victim]
        elif harm == 1:
            tensors[victim] = one.reshape(-1)[: max(1, one.size // 2)]
        elif harm == 2:
            tensors[victim] = one[:0]
        elif harm == 3:
            tensors[victim] = one.astype(np.float32) + np.float32(np.nan)
        else:
            raw = rng.integers(0, 256, one.nbytes).astype(np.uint8)
            tensors[victim] = raw.view(one.dtype).reshape(one.shape)
        found = quantization_of({"quantization_config": config})
        if not found.holds(NAME, tensors):
            continue
        try:
            matrix = found.read(NAME, tensors).dequantize()
        except TPUModelError:
            errors += 1
        else:
            assert matrix.ndim == 2
    assert errors > 10


def test_every_format_has_its_own_name():
    names = [name for one in FORMATS for name in one.methods]
    assert len(set(names)) == len(names)

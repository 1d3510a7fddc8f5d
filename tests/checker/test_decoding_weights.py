"""Narrow weights as `check --decode` compiles them: as many bytes as the formats come to."""

import re

import jax
import jax.numpy as jnp
import pytest

from tpukit.checker.decoding.weights import held_params, stored_params
from tpukit.compiler.program.request import as_abstract_mesh
from tpukit.errors import TPUValidationError
from tpukit.hardware import Slice
from tpukit.models import get_preset
from tpukit.models.adapters import adapt
from tpukit.models.generation.programs import DecodingPrograms
from tpukit.models.stored.calibration import path_text
from tpukit.models.stored.parameter import StoredParameter
from tpukit.planner.cost.serving_model import ServedModel
from tpukit.quantization import quantize_for_tpu


def nbytes(tree):
    return sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in jax.tree.leaves(tree))


def on_one_device(leaf):
    return leaf.sharding.shard_shape(leaf.shape)


def programs(name, tensor=1):
    config = get_preset(name).replace(param_dtype="bfloat16", dtype="bfloat16", mtp_layers=0)
    mesh = as_abstract_mesh({"tensor": tensor}, Slice.parse(f"v6e-{tensor}"))
    return DecodingPrograms(config, mesh, True)


@pytest.mark.parametrize(
    ("name", "format"),
    [("llama3.1-8b", "int8"), ("gpt-oss-20b", "int4"), ("deepseek-v2-lite", "fp8")],
)
def test_bytes_are_those_the_planner_counts(name, format):
    found = nbytes(stored_params(programs(name), format))
    assert found == pytest.approx(ServedModel.of(get_preset(name)).weight_bytes(format), rel=0.01)


def test_a_device_has_its_piece_of_every_matrix():
    whole = stored_params(programs("llama3.1-8b", 4), "int4")["layers"]
    up, down = (whole["mlp"][name]["kernel"].parts.part for name in ("up_proj", "down_proj"))
    assert on_one_device(up.data) == (32, 4096 // 8, 14336 // 4)
    assert on_one_device(down.data) == (32, 14336 // 8 // 4, 4096)
    assert on_one_device(down.scales) == (32, 14336 // 128 // 4, 4096)


def test_what_is_narrow_is_what_quantize_keeps_narrow():
    config = get_preset("tiny-moe").replace(
        n_experts=2,
        layer_kinds={"dense": {"n_experts": 0, "experts_per_token": 0}, "moe": {}},
        layer_pattern="dense then moe",
    )
    init = adapt(config, inputs=("inputs",), batch_shapes={}).init
    shapes = jax.eval_shape(lambda: init(jax.random.key(0)).params)
    made = jax.eval_shape(lambda params: quantize_for_tpu(config, params=params).params, shapes)
    server = DecodingPrograms(config, None, True)

    def kept(tree):
        leaves = jax.tree.leaves_with_path(tree, is_leaf=lambda x: isinstance(x, StoredParameter))
        return {path_text(path) for path, one in leaves if isinstance(one, StoredParameter)}

    held = jax.tree.leaves_with_path(held_params(server))
    in_fp8 = {path_text(path) for path, one in held if one.dtype == jnp.float8_e4m3fn}
    assert any("experts" in path for path in kept(made))
    assert not any(re.search("router|norm|embed|lm_head", path) for path in kept(made))
    assert kept(stored_params(server, "int8")) == kept(made) == in_fp8


def test_codes_cannot_be_compiled_without_a_codebook():
    with pytest.raises(TPUValidationError, match="'vq' cannot be compiled without their codebooks"):
        stored_params(programs("llama3.1-8b"), "vq")

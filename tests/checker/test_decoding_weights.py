"""Narrow weights as `check --decode` compiles them: as many bytes as the formats come to."""

import jax
import jax.numpy as jnp
import pytest

from tpukit.checker.decoding.weights import held_params, stored_params
from tpukit.compiler.program.request import as_abstract_mesh
from tpukit.errors import TPUValidationError
from tpukit.hardware import Slice
from tpukit.models import get_preset
from tpukit.models.generation.programs import DecodingPrograms
from tpukit.planner.cost.served_model import ServedModel


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


def test_products_in_fp8_hold_matrices_of_layers_and_no_others():
    held = held_params(programs("gpt-oss-20b"))
    assert held["layers"]["mlp"]["experts"]["up_proj"].dtype == jnp.float8_e4m3fn
    for wide in (held["layers"]["mlp"]["router"]["kernel"], held["lm_head"]["kernel"]):
        assert wide.dtype == jnp.bfloat16


def test_codes_cannot_be_compiled_without_a_codebook():
    with pytest.raises(TPUValidationError, match="'vq' cannot be compiled without their codebooks"):
        stored_params(programs("llama3.1-8b"), "vq")

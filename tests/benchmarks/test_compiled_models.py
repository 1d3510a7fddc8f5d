"""Families of models under mesh axes, through the real TPU compiler."""

import math

import pytest

from models import FAMILIES, LAYOUTS, SLICES, compile_cell
from tpukit.hardware import Slice

ATTENTION = {"flash_attention_forward", "flash_attention_backward"}
EXPERTS = {"grouped_matmul", "grouped_matmul_dlhs", "grouped_matmul_drhs"}
DELTA = {"gated_delta", "gated_delta_again", "gated_delta_backward"}

# family, mesh, slice, kernels it cannot do without
CELLS = [
    ("deepseek-v3", "pipeline", "v6e-8", ATTENTION | EXPERTS),
    ("deepseek-v3", "context", "v6e-8", ATTENTION | EXPERTS),
    ("qwen3-next", "fsdp", "v6e-8", ATTENTION | EXPERTS | DELTA),
    ("qwen3-next", "context", "v5p-16", ATTENTION | EXPERTS | DELTA),
    ("gpt-oss", "expert, tensor", "v5p-16", ATTENTION | EXPERTS),
    ("gpt-oss", "context", "v6e-8", ATTENTION | EXPERTS),
    ("gemma4-31b", "pipeline", "v6e-8", ATTENTION),
    ("gemma4-26b-a4b", "expert, tensor", "v6e-8", ATTENTION | EXPERTS),
    ("gemma4-e2b", "tensor", "v6e-8", ATTENTION),
    ("llama4", "expert, tensor", "7x-2x2x1", ATTENTION | EXPERTS),
]


@pytest.mark.slow
@pytest.mark.libtpu
@pytest.mark.xdist_group("libtpu")
@pytest.mark.parametrize(("family", "layout", "on", "kernels"), CELLS)
def test_families(family, layout, on, kernels):
    cell = compile_cell(family, layout, on)
    assert cell.outcome == "compiled", cell.reason
    assert kernels <= set(cell.kernels)


def test_what_a_pipeline_cannot_cut_is_refused_before_the_compiler():
    cell = compile_cell("gemma4-e2b", "pipeline", "v6e-8")
    assert cell.outcome == "refused"
    assert "mesh without a pipeline axis" in cell.reason


def test_every_family_keeps_its_heads():
    widths = {
        name: {(layer.qk_dim, layer.v_dim) for _, layer in config.layers()}
        for name, config in FAMILIES.items()
    }
    assert widths["deepseek-v3"] == {(192, 128)}
    assert widths["gpt-oss"] == {(64, 64)}
    assert widths["gemma4-31b"] == {(256, 256), (512, 512)}
    assert {layer.delta is None for _, layer in FAMILIES["qwen3-next"].layers()} == {True, False}


def test_meshes_have_the_devices_of_every_slice():
    assert {math.prod(layout.mesh.values()) for layout in LAYOUTS.values()} == {8}
    assert {Slice.parse(name).devices for name in SLICES} == {8}

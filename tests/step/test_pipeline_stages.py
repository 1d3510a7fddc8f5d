"""Which stages a model's layers can be cut into, and what is said where they cannot."""

import pytest

from tpukit.errors import ShardingError
from tpukit.models import get_preset
from tpukit.parallel import abstract_mesh
from tpukit.step.update import check_stages


def check(preset, stages):
    mesh = abstract_mesh(mesh_shape=(stages, 2), axis_names=("stage", "fsdp"))
    check_stages(get_preset(preset), mesh, "pipeline+fsdp")


@pytest.mark.parametrize(
    ("preset", "stages"),
    [("deepseek-v3", 2), ("kimi-k2", 4), ("qwen3-next-80b-a3b", 12), ("gpt-oss-120b", 6)],
)
def test_stages_hold_whole_patterns_behind_the_dense_layers(preset, stages):
    check(preset, stages)


@pytest.mark.parametrize(
    ("preset", "stages", "way_out"),
    [
        ("deepseek-v3", 4, r"4 stages would not .* use a pipeline of 2, 29, 58 stages"),
        ("gpt-oss-120b", 4, r"use a pipeline of 2, 3, 6, 9, 18 stages"),
        ("gemma4-e2b", 5, r"read embeddings or keys of other layers"),
    ],
)
def test_other_stages_are_refused_before_anything_is_placed(preset, stages, way_out):
    with pytest.raises(ShardingError, match=way_out):
        check(preset, stages)

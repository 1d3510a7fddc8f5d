"""What routing rows to experts costs: every link's load counted pair by pair."""

import dataclasses

import numpy as np
import pytest
from link_loads import busiest_link

from tpukit.hardware import Slice
from tpukit.models import get_preset
from tpukit.planner.cost.candidates import Candidates, SliceMesh
from tpukit.planner.cost.model_shape import shape_of
from tpukit.planner.cost.scoring import score
from tpukit.planner.cost.torus import place_axes

TOKENS = 8192


def ici_s(config, name, sizes, remat):
    target = Slice.parse(name)
    mesh = SliceMesh(target, sizes, place_axes(target, sizes))
    zero, one = np.asarray([0]), np.asarray([1])
    candidates = Candidates((mesh,), zero, one, one, zero, zero, zero, remats=(remat,))
    return score(shape_of(config), candidates, sequence_length=TOKENS).step.ici[0]


@pytest.mark.parametrize(
    ("name", "sizes", "length", "is_ring"),
    [
        ("v6e-64", {"fsdp": 8, "expert": 8}, 8, False),  # an axis of 8 does not wrap
        ("v6e-256", {"fsdp": 16, "expert": 16}, 16, True),
    ],
)
@pytest.mark.parametrize(("remat", "exchanges"), [("none", 4), ("full", 6)])
def test_rows_go_to_their_experts_and_back_in_every_pass(
    name, sizes, length, is_ring, remat, exchanges
):
    config = dataclasses.replace(get_preset("mixtral-8x7b"), n_experts=16)
    two, one = (
        ici_s(dataclasses.replace(config, experts_per_token=count), name, sizes, remat)
        for count in (2, 1)
    )
    row_bytes = TOKENS * config.d_model * 2
    part = row_bytes / length  # each device sends every other one its share
    once = part * busiest_link(length, is_ring=is_ring) / (90e9)  # the scaling book's link
    assert two - one == pytest.approx(exchanges * config.n_layers * once, rel=1e-6)

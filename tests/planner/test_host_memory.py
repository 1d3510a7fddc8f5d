"""What the planner counts on hosts, by hand, and which slices it refuses for it."""

import numpy as np
import pytest

from tpukit.models import get_preset
from tpukit.planner.cost.memory_model import MemorySplit, host_bytes
from tpukit.planner.cost.model_shape import shape_of
from tpukit.planner.planning import plan

LLAMA = shape_of(get_preset("llama3.1-8b"))
LARGEST = 32 * 4096 * 14336 * 4  # one of the three matrices of all MLPs, in float32


def memory(*, state, host):
    nothing = dict.fromkeys(("gradients", "activations", "temporaries"), 0.0)
    return MemorySplit(weights=state / 3, optimizer=state * 2 / 3, host=host, **nothing)


@pytest.mark.parametrize(
    ("state", "host", "need"),
    [
        (40e9, 5e9, 4 * 45e9),  # a checkpoint is written while activations wait
        (3e9, 0.0, 2 * (LARGEST + 1)),  # a restore: what is under way, as read and as stored
        (1e9, 0.0, 2 * 4e9),  # a small state is read at once
    ],
)
def test_the_most_that_a_host_holds(state, host, need):
    assert host_bytes(memory(state=state, host=host), LLAMA, 4) == pytest.approx(need)


def test_candidates_are_counted_together():
    many = memory(state=np.array([40e9, 4e9]), host=np.array([5e9, 0.0]))
    one_by_one = [
        host_bytes(memory(state=state, host=host), LLAMA, 4)
        for state, host in ((40e9, 5e9), (4e9, 0.0))
    ]
    assert host_bytes(many, LLAMA, np.array([4, 4])).tolist() == one_by_one


def test_a_slice_whose_hosts_cannot_hold_the_job_is_refused(monkeypatch):
    """The same slice is found with hosts as large as they are."""
    asked = {"tokens": 1e9, "on": "v6e-8", "verify": 0}
    assert plan("llama3.1-8b", **asked).feasible
    monkeypatch.setattr(
        "tpukit.planner.cost.scoring._host_ram_bytes", lambda chip: 2e9 if chip else None
    )
    refused = plan("llama3.1-8b", **asked)
    assert not refused.feasible
    assert "does not fit on its hosts" in refused.shortfall

import contextlib

import jax
import pytest
from jax._src import distributed

from tpukit.training.own_programs import keeping_own_programs


@pytest.mark.parametrize(("processes", "inside"), [(4, 0), (1, 3)])
def test_every_process_of_several_counts_as_the_first_while_it_compiles(
    monkeypatch, processes, inside
):
    monkeypatch.setattr(distributed.global_state, "process_id", 3)
    monkeypatch.setattr(jax, "process_count", lambda: processes)
    with contextlib.suppress(ValueError), keeping_own_programs():
        assert distributed.global_state.process_id == inside
        raise ValueError
    assert distributed.global_state.process_id == 3

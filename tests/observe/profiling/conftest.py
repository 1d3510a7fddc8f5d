"""Recordings of programs made to be bound by one thing each, made once."""

import jax
import pytest
from bound_programs import (
    communication_step,
    compute_step,
    input_step,
    memory_step,
)

from tpukit.observe import TPUProfiler

STEPS = 3
RECORDINGS = 3
MADE = {
    "compute": compute_step,
    "memory": memory_step,
    "communication": communication_step,
    "input": input_step,
}


@pytest.fixture(scope="session")
def recorded(tmp_path_factory):
    """A profiler by what bounds the program it recorded; each is recorded when first asked for.

    Of a few recordings the shortest: that is the one which other processes disturbed least.
    """
    made = {}

    def record(kind, step):
        profiler = TPUProfiler(tmp_path_factory.mktemp(kind))
        with profiler.profile(f"{kind} step"):
            for _ in range(STEPS):
                jax.block_until_ready(step())  # or it would run while the next batch is read
        return profiler

    def of(kind):
        if kind not in made:
            step = MADE[kind]()
            jax.block_until_ready(step())
            found = [record(kind, step) for _ in range(RECORDINGS)]
            made[kind] = min(found, key=lambda one: one.analyze_bottlenecks().duration_s)
        return made[kind]

    return of

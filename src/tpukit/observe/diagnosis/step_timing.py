"""A few training steps, run and timed on the devices of this process."""

import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass

import jax

from ...hardware import Figure
from ...parallel.mesh.mesh import create_mesh
from ...step.traced_flops import traced_flops
from ...step.workload import Workload

STEPS, WARM_UP_STEPS = 5, 2


@dataclass(frozen=True)
class StepTiming:
    """A few steps timed on the devices of this process.

    Attributes:
        flops: Of the step over all devices, as it was traced.
    """

    step_time_s: float
    compile_s: float
    flops: Figure
    steps: int
    devices: str


def time_steps(
    work: Workload, *, mesh: Mapping[str, int] | None = None, steps: int = STEPS
) -> StepTiming:
    """Run a few training steps on random batches and time them, compiling apart."""
    devices = jax.devices()
    sizes = dict(mesh or {"fsdp": len(devices) if work.examples % len(devices) == 0 else 1})
    count = math.prod(sizes.values())
    place = create_mesh(
        mesh_shape=tuple(sizes.values()), axis_names=tuple(sizes), devices=devices[:count]
    )
    batch = work.put_batch(place, work.example_batch())
    state = work.init_on(place, jax.random.key(0))
    started = time.perf_counter()
    traced = work.jit_train_step(place).trace(state, batch)
    compiled = traced.lower().compile()
    compile_s = time.perf_counter() - started
    taken: list[float] = []
    for _ in range(WARM_UP_STEPS + steps):
        started = time.perf_counter()
        state, metrics = compiled(state, batch)
        jax.block_until_ready((state, metrics))
        taken.append(time.perf_counter() - started)
    return StepTiming(
        step_time_s=statistics.median(taken[WARM_UP_STEPS:]),
        compile_s=compile_s,
        flops=traced_flops(traced.jaxpr.jaxpr),
        steps=steps,
        devices=f"{count} x {devices[0].device_kind}",
    )

"""A few training steps, run and timed on the devices of this process, and the FLOPs they do."""

import math
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import jax

from ...hardware import Figure
from ...parallel.mesh.mesh import create_mesh
from ...step.workload import Workload

STEPS, WARM_UP_STEPS = 5, 2
# Programs of their own, whose products a trace does not show.
_OPAQUE = ("pallas_call", "ffi_call", "tpu_custom_call", "triton_kernel_call")
_ATTENTION = "dot_product_attention"  # cuDNN's, by several names


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


class _Unknown(Exception):
    """Why FLOPs cannot be counted."""


def traced_flops(jaxpr: Any) -> Figure:
    """FLOPs of one run over all devices; missing, with the reason, where a part is not shown.

    A product whose result is never read counts too; a compiler would leave it out.

    Args:
        jaxpr: What `jax.jit(f).trace(...).jaxpr.jaxpr` gives.
    """
    try:
        return Figure(_flops(jaxpr), "FLOP", "model", "matrix products of the traced program")
    except _Unknown as reason:
        return Figure.missing("FLOP", str(reason))


def _flops(jaxpr: Any) -> float:
    return sum(_of_equation(equation) for equation in jaxpr.eqns)


def _of_equation(equation: Any) -> float:
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        left = equation.invars[0].aval.shape
        return (
            2.0 * prod(equation.outvars[0].aval.shape) * prod(left[place] for place in contracted)
        )
    if name == "conv_general_dilated":
        weights = equation.invars[1].aval.shape
        features = weights[params["dimension_numbers"].rhs_spec[0]]
        return 2.0 * prod(equation.outvars[0].aval.shape) * prod(weights) / features
    if name in ("ragged_dot", "ragged_dot_general"):
        left = equation.invars[0].aval.shape
        return 2.0 * prod(equation.outvars[0].aval.shape) * left[-1]
    if name in _OPAQUE or name.startswith(_ATTENTION):
        raise _Unknown(f"the program calls a kernel whose products its trace does not show: {name}")
    inner = [_flops(one) for one in _inner(params)]
    if name == "cond":
        return max(inner, default=0.0)
    if name == "while" and any(inner):
        raise _Unknown("a loop of the program has no constant length")
    if name == "scan":
        return params["length"] * sum(inner)
    if name == "shard_map":
        return params["mesh"].size * sum(inner)  # its shapes are those of one device
    return sum(inner)


def _inner(params: Any) -> Iterator[Any]:
    """The programs that an equation runs."""
    for value in params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            found = getattr(one, "jaxpr", one)
            if hasattr(found, "eqns"):
                yield found

"""FLOPs of a traced program: its matmuls, counted equation by equation."""

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, Any

import jax

from ..hardware import Figure
from ..kernels.partition.split_call import call_p

if TYPE_CHECKING:
    from .workload import Workload

# Kernels whose matmuls a trace does not show.
_OPAQUE = ("pallas_call", "ffi_call", "tpu_custom_call", "triton_kernel_call")
_ATTENTION = "dot_product_attention"  # cuDNN's, by several names


def model_flops(work: "Workload") -> Figure:
    """Return the FLOPs of a training step over all devices, without recomputation.

    For a reference transformer a formula counts them, with keys before the query only. For other
    models the matmuls of the traced step are counted, where the backward pass of fused attention
    includes recomputed scores.
    """
    counted = work.flops_per_step
    if counted.value is not None:
        return counted
    plain = work.replace(remat=None)
    traced = jax.make_jaxpr(plain.train_step)(plain.state_shapes(), plain.batch_shapes())
    return traced_flops(traced.jaxpr)


class _Unknown(Exception):
    """The reason why FLOPs cannot be counted."""


def traced_flops(jaxpr: Any) -> Figure:
    """Return the FLOPs of one run over all devices, or a missing figure with the reason.

    A matmul with an unused result counts too, although a compiler would remove it.

    Args:
        jaxpr: The value of `jax.jit(f).trace(...).jaxpr.jaxpr`.
    """
    try:
        return Figure(_flops(jaxpr), "FLOP", "model", "matmuls of the traced program")
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
        raise _Unknown(f"the program calls {name}, a kernel whose matmuls a trace does not show")
    if name in ("cond", call_p.name):
        return _of_branches([*_inner(params)])
    inner = [_flops(program) for program in _inner(params)]
    if name == "while" and any(inner):
        raise _Unknown("a loop of the program has no constant length")
    if name == "scan":
        return params["length"] * sum(inner)
    if name == "shard_map":
        return params["mesh"].size * sum(inner)  # shapes inside are per device
    return sum(inner)


def _of_branches(branches: list[Any]) -> float:
    """Return the FLOPs of the largest branch; an op's reference is counted for its kernel."""
    counted: list[float] = []
    hidden: _Unknown | None = None
    for branch in branches:
        try:
            counted.append(_flops(branch))
        except _Unknown as reason:
            hidden = reason
    if hidden is not None and not any(counted):
        raise hidden
    return max(counted, default=0.0)


def _inner(params: Any) -> Iterator[Any]:
    """Yield the programs that an equation calls."""
    for value in params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            program = getattr(item, "jaxpr", item)
            if hasattr(program, "eqns"):
                yield program

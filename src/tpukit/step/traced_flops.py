"""FLOPs of a traced program: its matrix products, counted equation by equation."""

from collections.abc import Iterator
from math import prod
from typing import TYPE_CHECKING, Any

import jax

from ..hardware import Figure
from ..kernels.partition.primitive import call_p

if TYPE_CHECKING:
    from .workload import Workload

# Programs of their own, whose products a trace does not show.
_OPAQUE = ("pallas_call", "ffi_call", "tpu_custom_call", "triton_kernel_call")
_ATTENTION = "dot_product_attention"  # cuDNN's, by several names


def model_flops(work: "Workload") -> Figure:
    """FLOPs of a training step of any model over all devices, without recomputation.

    Of a reference transformer by formula, which counts no key after the query; of other models by
    the products of their step, in which fused attention's backward pass makes its scores again.
    """
    counted = work.flops_per_step
    if counted.value is not None:
        return counted
    plain = work.replace(remat=None)
    traced = jax.make_jaxpr(plain.train_step)(plain.state_shapes(), plain.batch_shapes())
    return traced_flops(traced.jaxpr)


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
    if name in ("cond", call_p.name):
        return _of_branches([*_inner(params)])
    inner = [_flops(one) for one in _inner(params)]
    if name == "while" and any(inner):
        raise _Unknown("a loop of the program has no constant length")
    if name == "scan":
        return params["length"] * sum(inner)
    if name == "shard_map":
        return params["mesh"].size * sum(inner)  # its shapes are those of one device
    return sum(inner)


def _of_branches(branches: list[Any]) -> float:
    """Count the dearest branch; an op's reference stands for a kernel that shows no products."""
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
    """The programs that an equation runs."""
    for value in params.values():
        for one in value if isinstance(value, tuple | list) else (value,):
            found = getattr(one, "jaxpr", one)
            if hasattr(found, "eqns"):
                yield found

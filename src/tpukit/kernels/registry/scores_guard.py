"""A check that a function never holds all scores of its attention at once."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend import core

from ...errors import TPUKernelError
from .op import shape_text

# Scores of S tokens with heads of D outweigh queries, keys, values and result S / 4D times.
TOO_MANY_TIMES = 4


def refuse_all_scores(name: str, function: Callable[..., Any], *arrays: Any) -> None:
    """Trace `function` and refuse it if a product in it holds a whole score matrix.

    That is one with batch axes (of heads) and two sides that are both axes of arguments (of
    queries and keys), whose result outweighs everything given and returned four times. Blocks of
    it, in a loop or in a kernel, pass; so do short sequences, where nothing is saved.

    Raises:
        TPUKernelError: With the array found and what to call instead.
    """
    closed = jax.make_jaxpr(function)(*arrays)
    outside = [*closed.in_avals, *closed.out_avals]
    most = TOO_MANY_TIMES * sum(math.prod(aval.shape) for aval in outside)
    axes = {size for aval in closed.in_avals for size in aval.shape}
    for equation in _products(closed.jaxpr):
        found = equation.outvars[0].aval
        if math.prod(found.shape) > most and _joins(equation, axes):
            raise TPUKernelError(
                f"{name} was made with use_efficient_attention=True and holds all scores at once, "
                f"{shape_text(found)}; call tpukit.kernels.flash_attention, which keeps a block "
                "of them at a time."
            )


def _products(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            yield equation
        elif equation.primitive.name != "pallas_call":  # its arrays are blocks in VMEM
            for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
                if _is_jaxpr(inner):
                    yield from _products(getattr(inner, "jaxpr", inner))


def _is_jaxpr(value: object) -> bool:
    return isinstance(value, core.Jaxpr | core.ClosedJaxpr)


def _joins(equation: Any, axes: set[int]) -> bool:
    """Whether it is a batched product whose longest axis on either side is one of `axes`."""
    contracted, batch = equation.params["dimension_numbers"]
    if not batch[0]:
        return False
    longest: list[int] = []
    for operand, *taken in zip(equation.invars, contracted, batch, strict=True):
        shape = operand.aval.shape
        free = [size for at, size in enumerate(shape) if not any(at in one for one in taken)]
        longest.append(max(free, default=1))
    return axes.issuperset(longest)

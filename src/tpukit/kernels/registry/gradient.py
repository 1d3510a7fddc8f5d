"""Gradients of ops: the two passes of each implementation, and the one place that joins them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from ...annotations import PyTree
from ..partition.split_call import split_as
from ..partition.splits import Splits
from .dispatch import dispatch
from .op import find_implementation

Forward = Callable[..., tuple[PyTree, PyTree]]
Backward = Callable[..., tuple[PyTree, ...]]


@dataclass(frozen=True)
class Passes:
    """The two passes of one implementation. All implementations of an op share the residuals.

    Attributes:
        forward: `f(*arrays, **options)` -> the result and the residuals.
        backward: `f(residuals, cotangent, **options)` -> the gradient of each array, in order;
            None for those that have none.
        result: `f(*arrays, **options)` -> the result, where nobody asks for a gradient; None takes
            that of `forward`.
    """

    forward: Forward
    backward: Backward
    result: Callable[..., PyTree] | None = None

    def alone(self, *arrays: PyTree, **options: Any) -> PyTree:
        """The result without residuals."""
        return (self.result or self._without_residuals)(*arrays, **options)

    def _without_residuals(self, *arrays: PyTree, **options: Any) -> PyTree:
        return self.forward(*arrays, **options)[0]


def recomputed(function: Callable[..., PyTree], *, constants: int = 0) -> Passes:
    """Both passes of a plain function: it keeps its arguments and is run again for the gradient.

    The last `constants` arguments have no gradient.
    """

    def forward(*arrays: PyTree, **options: Any) -> tuple[PyTree, PyTree]:
        return function(*arrays, **options), arrays

    def backward(residuals: PyTree, cotangent: PyTree, **options: Any) -> tuple[PyTree, ...]:
        variable = len(residuals) - constants
        fixed = residuals[variable:]
        _, pull = jax.vjp(
            lambda *arrays: function(*arrays, *fixed, **options), *residuals[:variable]
        )
        return (*pull(cotangent), *[None] * constants)

    return Passes(forward, backward)


def with_backward(
    forward: Forward,
    backward: Backward,
    *arrays: PyTree,
    result: Callable[..., PyTree] | None = None,
) -> PyTree:
    """The result of `forward`, whose gradient `backward` computes from what `forward` kept.

    Args:
        forward: `f(*arrays)` -> the result and the residuals.
        backward: `f(residuals, cotangent)` -> the gradients of the arrays, None for those that
            have none; more of them than arrays are cut off.
        *arrays: Arrays, or trees of them; None for one that is left out.
        result: `f(*arrays)` -> the result, where nobody asks for a gradient; None takes that of
            `forward`.
    """

    @jax.custom_vjp
    def call(*arrays: PyTree) -> PyTree:
        return forward(*arrays)[0] if result is None else result(*arrays)

    kinds = jax.tree.map(jax.typeof, arrays)

    def pull(residuals: PyTree, cotangent: PyTree) -> tuple[PyTree, ...]:
        # An optional array that was not given is no argument that wants a gradient.
        pairs = zip(backward(residuals, cotangent), kinds, strict=False)
        return tuple(None if one is None else split_as(one, kind) for one, kind in pairs)

    call.defvjp(forward, pull)
    return call(*arrays)


def dispatch_with_gradient(
    op: str,
    passes: Mapping[str, Passes],
    *arrays: PyTree,
    splits: Splits | None = None,
    keep: Callable[[Any, Any], tuple[PyTree, PyTree]] | None = None,
    **choice: Any,
) -> PyTree:
    """`dispatch` for an op with a gradient: both passes choose, and one set of residuals is kept.

    Args:
        op: As for `dispatch`.
        passes: The forward and backward functions by implementation.
        *arrays: Arrays, or trees of them; None for one that is left out.
        splits: The names of the arrays' dimensions, and which may be split.
        keep: (result, residuals) -> the same, with names for a remat policy.
        **choice: The keyword arguments of `dispatch`.

    Raises:
        TPUKernelError: There is no implementation of the name asked for, or it does not run here.
    """
    named = splits or Splits()

    def one(part: str, names: Any) -> Callable[..., PyTree]:
        functions = {name: getattr(both, part) for name, both in passes.items()}
        return partial(dispatch, op, functions, names=names, **choice)

    forward = one("forward", named.forward)
    return with_backward(
        forward if keep is None else lambda *arrays: keep(*forward(*arrays)),
        one("backward", named.backward),
        *arrays,
        result=one("alone", named.alone),
    )


def with_gradient(
    op: str, passes: Mapping[str, Passes], name: str, splits: Splits | None = None
) -> Callable[..., PyTree]:
    """One implementation of an op as a function `f(*arrays, **options)` with its gradient.

    This is what `Op.implementations` holds: for "pallas_tpu" it takes `blocks` and `interpret`
    among the options.
    """
    both = {name: find_implementation(op, passes, name)}

    def call(*arrays: PyTree, **options: Any) -> PyTree:
        return dispatch_with_gradient(
            op, both, *arrays, splits=splits, implementation=name, options=options
        )

    return call

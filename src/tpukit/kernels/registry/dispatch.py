"""Which implementation runs: chosen by the platform a program is lowered for, not by the host."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from ...errors import TPUKernelError
from .op import PALLAS_TPU, REFERENCE, find_implementation


def dispatch(
    op: str,
    implementations: Mapping[str, Callable[..., Any]],
    *arrays: Any,
    implementation: str | None = None,
    on_tpu: str = PALLAS_TPU,
    on_gpu: str = REFERENCE,
    elsewhere: str = REFERENCE,
    options: Mapping[str, Any] | None = None,
    pallas_options: Mapping[str, Any] | None = None,
    own_precision: bool = True,
) -> Any:
    """Run `op` on `arrays`, by name or as the platform of the lowering wants it.

    A program that is exported on a laptop for a TPU holds the TPU kernel. All implementations
    that are candidates are traced, so they must accept the same shapes; where a kernel does not,
    the op names another one as `on_tpu`.

    Differentiating through this function would keep the residuals of every candidate, not only
    of the one that runs: an op with a gradient calls `dispatch_with_gradient`.

    Args:
        op: The op's name, for messages and for the scope that profiles show.
        implementations: By name.
        *arrays: Arrays, or trees of them.
        implementation: A name, which is taken and never replaced; None chooses.
        on_tpu: What None means on a TPU.
        on_gpu: What None means on an NVIDIA GPU.
        elsewhere: What None means on everything else.
        options: Static keyword arguments of all implementations.
        pallas_options: Further ones of "pallas_tpu" alone, such as `blocks`.
        own_precision: Whether "pallas_tpu" says itself how exact its products are, so that
            `jax.default_matmul_precision` is not for it: Mosaic refuses "high".

    Raises:
        TPUKernelError: There is no implementation of that name, or it does not run here.
    """
    shared, own = dict(options or {}), dict(pallas_options or {})

    def bound(name: str) -> Callable[..., Any]:
        function = find_implementation(op, implementations, name)
        keywords = {**shared, **own} if name == PALLAS_TPU else shared

        def call(*arrays: Any) -> Any:
            if name != PALLAS_TPU or not own_precision:
                return function(*arrays, **keywords)
            with jax.default_matmul_precision(None):
                return function(*arrays, **keywords)

        return call

    with jax.named_scope(op):
        if implementation is not None:
            with _explained(op, implementation):
                return bound(implementation)(*arrays)
        candidates = {name: bound(name) for name in (on_tpu, on_gpu, elsewhere)}
        if len(candidates) == 1:
            return candidates[elsewhere](*arrays)
        return jax.lax.platform_dependent(
            *arrays,
            tpu=candidates[on_tpu],
            cuda=candidates[on_gpu],
            default=candidates[elsewhere],
        )


@contextmanager
def _explained(op: str, implementation: str | None) -> Generator[None]:
    """Say what jax means where a kernel asked for by name is run at once on a CPU."""
    try:
        yield
    except ValueError as error:
        if implementation is None or "Only interpret mode is supported" not in str(error):
            raise
        raise TPUKernelError(
            f"{op} was asked for as {implementation!r}, and that kernel does not run on the "
            f"{jax.default_backend()} here; leave implementation= out to take what does."
        ) from error


@dataclass(frozen=True)
class Passes:
    """The two passes of one implementation. All implementations of an op share the residuals.

    Attributes:
        forward: `f(*arrays, **options)` -> the result and the residuals.
        backward: `f(residuals, cotangent, **options)` -> the gradient of each array, in order;
            None for those that have none.
    """

    forward: Callable[..., tuple[Any, Any]]
    backward: Callable[..., tuple[Any, ...]]


def recomputed(function: Callable[..., Any]) -> Passes:
    """Both passes of a plain function: it keeps its arguments and is run again for the gradient."""

    def forward(*arrays: Any, **options: Any) -> tuple[Any, Any]:
        return function(*arrays, **options), arrays

    def backward(residuals: Any, cotangent: Any, **options: Any) -> tuple[Any, ...]:
        _, pull = jax.vjp(partial(function, **options), *residuals)
        return pull(cotangent)

    return Passes(forward, backward)


def dispatch_with_gradient(
    op: str, passes: Mapping[str, Passes], *arrays: Any, **choice: Any
) -> Any:
    """`dispatch` for an op with a gradient: both passes choose, and one set of residuals is kept.

    Args:
        op: As for `dispatch`.
        passes: The forward and backward functions by implementation.
        *arrays: Arrays, or trees of them; None for one that is left out.
        **choice: The keyword arguments of `dispatch`.

    Raises:
        TPUKernelError: There is no implementation of the name asked for, or it does not run here.
    """
    forward = partial(dispatch, op, {name: both.forward for name, both in passes.items()})
    backward = partial(dispatch, op, {name: both.backward for name, both in passes.items()})

    given = len(arrays)

    @jax.custom_vjp
    def call(*arrays: Any) -> Any:
        return forward(*arrays, **choice)[0]

    def keep(*arrays: Any) -> tuple[Any, Any]:
        return forward(*arrays, **choice)

    def pull(residuals: Any, cotangent: Any) -> tuple[Any, ...]:
        # An optional array that was not given is no argument that wants a gradient.
        return tuple(backward(residuals, cotangent, **choice))[:given]

    call.defvjp(keep, pull)
    with _explained(op, choice.get("implementation")):
        return call(*arrays)


def with_gradient(op: str, passes: Mapping[str, Passes], name: str) -> Callable[..., Any]:
    """One implementation of an op as a function `f(*arrays, **options)` with its gradient.

    This is what `Op.implementations` holds: for "pallas_tpu" it takes `blocks` and `interpret`
    among the options.
    """
    both = {name: find_implementation(op, passes, name)}

    def call(*arrays: Any, **options: Any) -> Any:
        return dispatch_with_gradient(op, both, *arrays, implementation=name, options=options)

    return call

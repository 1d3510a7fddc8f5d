"""Choose an op's implementation by the platform a program is lowered for, with its gradient."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.sharding import AxisType

from ...annotations import PyTree
from ...errors import TPUKernelError
from ..partition.split_call import Candidate, split_as, split_call
from ..partition.splits import Pass, Splits
from .op import KERNELS, PALLAS_TPU, REFERENCE, find_implementation

Forward = Callable[..., tuple[PyTree, PyTree]]
Backward = Callable[..., tuple[PyTree, ...]]


def dispatch(
    op: str,
    implementations: Mapping[str, Callable[..., PyTree]],
    *arrays: PyTree,
    implementation: str | None = None,
    on_tpu: str = PALLAS_TPU,
    on_gpu: str = REFERENCE,
    elsewhere: str = REFERENCE,
    options: Mapping[str, Any] | None = None,
    pallas_options: Mapping[str, Any] | None = None,
    own_precision: bool = True,
    names: Pass | None = None,
) -> PyTree:
    """Run `op` on `arrays`, by name or as the platform of the lowering wants it.

    A program that is exported on a laptop for a TPU contains the TPU kernel. All candidate
    implementations are traced, so they must accept the same shapes; where a kernel does not, the
    op passes another name as `on_tpu`. Where arrays are sharded over a mesh, a kernel runs on each
    device's shards. The compiler partitions everything else.

    Differentiating through this function would keep the residuals of every candidate, not only
    those of the one that runs, so an op with a gradient calls `dispatch_with_gradient`.

    Args:
        op: The op's name, for messages and for the scope that profiles show.
        implementations: By name.
        *arrays: Arrays, or trees of them.
        implementation: A name, which is never replaced by another; None chooses by platform.
        on_tpu: The name for TPUs.
        on_gpu: The name for NVIDIA GPUs.
        elsewhere: The name for other platforms, and for programs of several devices in which the
            shardings of the arrays are not known.
        options: Static keyword arguments of all implementations.
        pallas_options: Further ones of "pallas_tpu" alone, such as `blocks`.
        own_precision: Whether "pallas_tpu" sets the precision of its matmuls itself and ignores
            `jax.default_matmul_precision`, because Mosaic refuses "high".
        names: Names of the arrays' dimensions, and which may be sharded; None shards nothing, so
            that a kernel runs on gathered arrays on every device.

    Raises:
        TPUKernelError: There is no implementation of that name, or it does not run here.
    """
    shared, own = dict(options or {}), dict(pallas_options or {})

    def candidate(name: str) -> Candidate:
        function = find_implementation(op, implementations, name)
        keywords = {**shared, **own} if name == PALLAS_TPU else shared

        def call(*arrays: PyTree, **axes: Any) -> PyTree:
            if name != PALLAS_TPU or not own_precision:
                return function(*arrays, **keywords, **axes)
            with jax.default_matmul_precision(None):
                return function(*arrays, **keywords, **axes)

        return Candidate(call, is_kernel=name in KERNELS)

    chosen = {"tpu": on_tpu, "cuda": on_gpu, "default": elsewhere}
    if implementation is not None:
        chosen = {"default": implementation}
    candidates = {name: candidate(name) for name in chosen.values()}
    with jax.named_scope(op), _explain_interpret_error(op, implementation):
        has_kernel = any(candidate.is_kernel for candidate in candidates.values())
        if not has_kernel or _is_manual_everywhere():
            functions = {platform: candidates[name].function for platform, name in chosen.items()}
            if len(candidates) == 1:
                return functions["default"](*arrays)
            return jax.lax.platform_dependent(*arrays, **functions)
        is_named = implementation is not None
        names = names or Splits().alone
        return split_call(op, candidates, chosen, names, *arrays, is_named=is_named)


@dataclass(frozen=True)
class Passes:
    """The two passes of one implementation. All implementations of an op share the residuals.

    Attributes:
        forward: `f(*arrays, **options)` -> the result and the residuals.
        backward: `f(residuals, cotangent, **options)` -> the gradient of each array, in order;
            None for those that have none.
        result: `f(*arrays, **options)` -> the result, for calls without a gradient; None takes
            the result of `forward`.
    """

    forward: Forward
    backward: Backward
    result: Callable[..., PyTree] | None = None

    def alone(self, *arrays: PyTree, **options: Any) -> PyTree:
        """Return the result without residuals."""
        if self.result is not None:
            return self.result(*arrays, **options)
        return self.forward(*arrays, **options)[0]


def recomputed(function: Callable[..., PyTree], *, constants: int = 0) -> Passes:
    """Return both passes of a plain function, which runs again for the gradient.

    The residuals are the arguments, of which the last `constants` have no gradient.
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
    """Return the result of `forward`, whose gradient `backward` computes from the residuals.

    Args:
        forward: `f(*arrays)` -> the result and the residuals.
        backward: `f(residuals, cotangent)` -> the gradients of the arrays, None for those that
            have none; surplus gradients are ignored.
        *arrays: Arrays, or trees of them; None for an optional array that is not given.
        result: `f(*arrays)` -> the result, for calls without a gradient; None takes the result
            of `forward`.
    """

    @jax.custom_vjp
    def call(*arrays: PyTree) -> PyTree:
        return forward(*arrays)[0] if result is None else result(*arrays)

    types = jax.tree.map(jax.typeof, arrays)

    def pull(residuals: PyTree, cotangent: PyTree) -> tuple[PyTree, ...]:
        # An optional array that was not given has no gradient.
        pairs = zip(backward(residuals, cotangent), types, strict=False)
        return tuple(
            None if gradient is None else split_as(gradient, type) for gradient, type in pairs
        )

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
    """Call `dispatch` for an op with a gradient: both passes share one set of residuals.

    Args:
        op: As for `dispatch`.
        passes: The forward and backward functions by implementation.
        *arrays: Arrays, or trees of them; None for an optional array that is not given.
        splits: The names of the arrays' dimensions, and which may be sharded.
        keep: (result, residuals) -> the same, with names for a remat policy.
        **choice: The keyword arguments of `dispatch`.

    Raises:
        TPUKernelError: There is no implementation of that name, or it does not run here.
    """
    splits = splits or Splits()

    def dispatched(part: str, names: Pass) -> Callable[..., PyTree]:
        functions = {name: getattr(both, part) for name, both in passes.items()}
        return partial(dispatch, op, functions, names=names, **choice)

    forward = dispatched("forward", splits.forward)
    return with_backward(
        forward if keep is None else lambda *arrays: keep(*forward(*arrays)),
        dispatched("backward", splits.backward),
        *arrays,
        result=dispatched("alone", splits.alone),
    )


def with_gradient(
    op: str, passes: Mapping[str, Passes], name: str, splits: Splits | None = None
) -> Callable[..., PyTree]:
    """Return one implementation of an op as `f(*arrays, **options)` with its gradient.

    These are the values of `Op.implementations`; the one for "pallas_tpu" takes `blocks` and
    `interpret` among the options.
    """
    both = {name: find_implementation(op, passes, name)}

    def call(*arrays: PyTree, **options: Any) -> PyTree:
        return dispatch_with_gradient(
            op, both, *arrays, splits=splits, implementation=name, options=options
        )

    return call


def _is_manual_everywhere() -> bool:
    """Whether this is the body of a `shard_map` over all axes, so that every array is a shard."""
    kinds = jax.sharding.get_abstract_mesh().axis_types
    return bool(kinds) and all(kind == AxisType.Manual for kind in kinds)


@contextmanager
def _explain_interpret_error(op: str, implementation: str | None) -> Generator[None]:
    """Replace jax's error for a named kernel that is run directly on a CPU."""
    try:
        yield
    except ValueError as error:
        if implementation is None or "Only interpret mode is supported" not in str(error):
            raise
        raise TPUKernelError(
            f"{op} was called with implementation={implementation!r}, but that kernel does not run "
            f"on the {jax.default_backend()} here; leave implementation= out to choose one that "
            "does."
        ) from error

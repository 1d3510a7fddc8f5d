"""Which implementation runs: chosen by the platform a program is lowered for, not by the host."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
from jax.sharding import AxisType

from ...annotations import PyTree
from ...errors import TPUKernelError
from ..partition.split_call import Candidate, split_call
from ..partition.splits import Pass, Splits
from .op import KERNELS, PALLAS_TPU, REFERENCE, find_implementation


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

    A program that is exported on a laptop for a TPU holds the TPU kernel. All implementations
    that are candidates are traced, so they must accept the same shapes; where a kernel does not,
    the op names another one as `on_tpu`. Where arrays are split over a mesh, a kernel runs on each
    device's pieces; anything else is left to the compiler, which partitions it.

    Differentiating through this function would keep the residuals of every candidate, not only
    of the one that runs: an op with a gradient calls `dispatch_with_gradient`.

    Args:
        op: The op's name, for messages and for the scope that profiles show.
        implementations: By name.
        *arrays: Arrays, or trees of them.
        implementation: A name, which is taken and never replaced; None chooses.
        on_tpu: What None means on a TPU.
        on_gpu: What None means on an NVIDIA GPU.
        elsewhere: What None means on everything else, and where nobody can say how the arrays of a
            program for several devices are split.
        options: Static keyword arguments of all implementations.
        pallas_options: Further ones of "pallas_tpu" alone, such as `blocks`.
        own_precision: Whether "pallas_tpu" says itself how exact its products are, so that
            `jax.default_matmul_precision` is not for it: Mosaic refuses "high".
        names: Of the arrays' dimensions, and which may be split; None splits nothing, so that a
            kernel runs on whole arrays on every device.

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
    with jax.named_scope(op), _explained(op, implementation):
        if not any(one.is_kernel for one in candidates.values()) or _is_one_piece():
            functions = {platform: candidates[name].function for platform, name in chosen.items()}
            if len(candidates) == 1:
                return functions["default"](*arrays)
            return jax.lax.platform_dependent(*arrays, **functions)
        is_named = implementation is not None
        names = names or Splits().alone
        return split_call(op, candidates, chosen, names, *arrays, is_named=is_named)


def _is_one_piece() -> bool:
    """Whether this is the body of a `shard_map` over the whole mesh: every array is a piece."""
    kinds = jax.sharding.get_abstract_mesh().axis_types
    return bool(kinds) and all(kind == AxisType.Manual for kind in kinds)


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

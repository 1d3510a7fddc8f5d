"""`grouped_matmul`: the product of a dropless mixture of experts."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ....errors import TPUKernelError
from ...registry.dispatch import Passes, dispatch_with_gradient, with_gradient
from ...registry.op import PALLAS_TPU, REFERENCE, TRITON, XLA
from . import gpu, pallas_tpu
from .blocks import GroupedBlocks
from .reference import grouped_matmul_reference

OP_NAME = pallas_tpu.OP_NAME


def grouped_matmul(
    lhs: jax.Array,
    rhs: jax.Array,
    group_sizes: jax.Array,
    *,
    implementation: str | None = None,
    blocks: GroupedBlocks | None = None,
    expected_rows: int | None = None,
) -> jax.Array:
    """Rows of `lhs`, sorted by group, each times the weight of its group; summed in float32.

    Args:
        lhs: (M, K): `group_sizes[0]` rows of group 0, then those of group 1, and so on.
        rhs: (G, K, N) the weights.
        group_sizes: (G,) integers, at least 0, with a sum of at most M. Rows past the sum belong
            to nobody: their result and their gradient are zero.
        implementation: "pallas_tpu", "triton", "xla" (`jax.lax.ragged_dot`) or "reference". None
            takes a kernel on TPU and, for whole tiles of 16 bits, on an NVIDIA GPU; else "xla".
        blocks: Of the Pallas kernels; None takes the tuned ones.
        expected_rows: How many rows belong to a group in most runs, where a buffer has room for
            the worst: the kernels state their cost for so many. None expects all.

    Returns:
        (M, N), in the dtype of lhs.

    Raises:
        TPUKernelError: Shapes or dtypes that do not belong together.
    """
    _check(lhs, rhs, group_sizes)
    return dispatch_with_gradient(
        OP_NAME,
        PASSES,
        *(lhs, rhs, group_sizes),
        implementation=implementation,
        on_gpu=TRITON if gpu.fits(lhs, rhs) else XLA,
        elsewhere=XLA,
        pallas_options={"blocks": blocks, "expected_rows": expected_rows},
    )


def _xla(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
    wide = jnp.promote_types(lhs.dtype, jnp.float32)
    # Rows of nobody may be anything after a ragged product, and in its gradient.
    counted = jnp.arange(lhs.shape[0])[:, None] < group_sizes.sum()
    product = jax.lax.ragged_dot(
        jnp.where(counted, lhs, 0), rhs, group_sizes, preferred_element_type=wide
    )
    return jnp.where(counted, product, 0).astype(lhs.dtype)


def _check(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> None:
    if lhs.ndim != 2 or rhs.ndim != 3 or lhs.shape[1] != rhs.shape[1]:
        raise TPUKernelError(
            f"grouped_matmul multiplies lhs {lhs.shape} by rhs {rhs.shape}; expected (rows, K) and "
            "(groups, K, N)."
        )
    if group_sizes.shape != rhs.shape[:1] or not jnp.issubdtype(group_sizes.dtype, jnp.integer):
        raise TPUKernelError(
            f"group_sizes are {group_sizes.dtype}{list(group_sizes.shape)}; expected "
            f"{rhs.shape[0]} integers, one for each group of rhs."
        )
    if lhs.dtype != rhs.dtype:
        raise TPUKernelError(
            f"lhs is {lhs.dtype} and rhs {rhs.dtype}; cast one of them, they must be the same."
        )


def _recomputed(function: Callable[..., jax.Array]) -> Passes:
    """Both passes of a plain function; sizes have no gradient."""

    def forward(*arrays: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        return function(*arrays), arrays

    def backward(
        residuals: tuple[jax.Array, ...], cotangent: jax.Array
    ) -> tuple[jax.Array, jax.Array, None]:
        lhs, rhs, group_sizes = residuals
        _, pull = jax.vjp(lambda lhs, rhs: function(lhs, rhs, group_sizes), lhs, rhs)
        return *pull(cotangent), None

    return Passes(forward, backward)


PASSES = {
    PALLAS_TPU: Passes(pallas_tpu.forward, pallas_tpu.backward),
    TRITON: Passes(gpu.forward, gpu.backward),
    XLA: _recomputed(_xla),
    REFERENCE: _recomputed(grouped_matmul_reference),
}
IMPLEMENTATIONS = {name: with_gradient(OP_NAME, PASSES, name) for name in PASSES}

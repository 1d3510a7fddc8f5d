"""`grouped_matmul`: the product of a dropless mixture of experts."""

from typing import Any

import jax
import jax.numpy as jnp

from ....errors import TPUKernelError
from ...partition.splits import Assignment, Splits, add_up
from ...registry.gradient import Passes, dispatch_with_gradient, recomputed, with_gradient
from ...registry.op import PALLAS_TPU, REFERENCE, TRITON, XLA
from . import pallas_tpu, triton_gpu
from .blocks import GroupedBlocks
from .pallas_tpu import Residuals
from .reference import grouped_matmul_reference, grouped_matmul_xla
from .visits import sizes_in_piece

OP_NAME = pallas_tpu.OP_NAME
# A piece of the rows has its own sizes; groups are gathered, since any row may belong to any.
SPLITS = Splits(
    free="m k n",
    arguments=("m k", "g k n", "g"),
    result="m n",
    residuals=("m k", "g k n", "g"),
    told_axes=True,
)


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
    _check(lhs, rhs, group_sizes, implementation)
    return dispatch_with_gradient(
        OP_NAME,
        PASSES,
        *(lhs, rhs, group_sizes),
        splits=SPLITS,
        implementation=implementation,
        on_gpu=TRITON if triton_gpu.fits(lhs, rhs) else XLA,
        elsewhere=XLA,
        pallas_options={"blocks": blocks, "expected_rows": expected_rows},
    )


def _check(
    lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array, implementation: str | None
) -> None:
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
    if implementation == TRITON and not triton_gpu.fits(lhs, rhs):
        tiles = triton_gpu.FORWARD
        raise TPUKernelError(
            f"the Triton kernel of grouped_matmul was asked for and lhs is {lhs.dtype}"
            f"{list(lhs.shape)}, rhs {list(rhs.shape)}; it takes bfloat16 or float16, rows in "
            f"multiples of {tiles.rows} and both sizes of a weight in multiples of "
            f'{tiles.columns}. implementation="xla" takes any shape.'
        )


def _on_pieces(passes: Passes) -> Passes:
    """Kernels that know of no mesh, on pieces of the rows, of the sum or of the columns."""

    def forward(
        lhs: jax.Array,
        rhs: jax.Array,
        group_sizes: jax.Array,
        *,
        axes: Assignment | None = None,
        **options: Any,
    ) -> tuple[jax.Array, Residuals]:
        split = dict(axes or {})
        sizes = sizes_in_piece(group_sizes, lhs.shape[0], split.get("m", ()))
        out, _ = passes.forward(lhs, rhs, sizes, **options)
        return add_up(out, split.get("k", ())), (lhs, rhs, group_sizes)

    def backward(
        residuals: Residuals,
        cotangent: jax.Array,
        *,
        axes: Assignment | None = None,
        **options: Any,
    ) -> tuple[jax.Array, jax.Array, None]:
        split = dict(axes or {})
        lhs, rhs, group_sizes = residuals
        sizes = sizes_in_piece(group_sizes, lhs.shape[0], split.get("m", ()))
        d_lhs, d_rhs, _ = passes.backward((lhs, rhs, sizes), cotangent, **options)
        return add_up(d_lhs, split.get("n", ())), add_up(d_rhs, split.get("m", ())), None

    return Passes(forward, backward)


PASSES = {
    PALLAS_TPU: _on_pieces(Passes(pallas_tpu.forward, pallas_tpu.backward)),
    TRITON: _on_pieces(Passes(triton_gpu.forward, triton_gpu.backward)),
    XLA: recomputed(grouped_matmul_xla, constants=1),
    REFERENCE: recomputed(grouped_matmul_reference, constants=1),
}
IMPLEMENTATIONS = {name: with_gradient(OP_NAME, PASSES, name, SPLITS) for name in PASSES}

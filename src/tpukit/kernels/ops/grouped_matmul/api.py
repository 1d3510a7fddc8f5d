"""`grouped_matmul`: the matmul of a dropless mixture of experts."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import RaggedDotDimensionNumbers

from ....errors import TPUKernelError
from ...partition.splits import Assignment, Splits, add_up
from ...registry.dispatch import Passes, dispatch, dispatch_with_gradient, recomputed, with_gradient
from ...registry.op import PALLAS_TPU, REFERENCE, TRITON, XLA, KernelCase, Op
from . import pallas_tpu, triton_gpu
from .blocks import GroupedBlocks, block_space, default_blocks, vmem_bytes
from .pallas_tpu import OP_NAME, Residuals, grouped_product, grouped_sum
from .reference import grouped_matmul_reference, grouped_matmul_xla
from .visits import shard_sizes

# A shard of the rows has its own sizes; groups are gathered, because any row may belong to any.
SPLITS = Splits(
    free="m k n",
    arguments=("m k", "g k n", "g"),
    result="m n",
    residuals=("m k", "g k n", "g"),
    takes_axes=True,
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
    """Multiply rows of `lhs`, sorted by group, by the weight of their group; sum in float32.

    Args:
        lhs: (M, K): `group_sizes[0]` rows of group 0, then those of group 1, and so on.
        rhs: (G, K, N) the weights.
        group_sizes: (G,) integers, at least 0, with a sum of at most M. Rows past the sum belong to
            no group: their result and their gradient are zero.
        implementation: "pallas_tpu", "triton", "xla" (`jax.lax.ragged_dot`) or "reference". None
            takes a kernel on TPU and, for full tiles of 16 bits, on an NVIDIA GPU; else "xla".
        blocks: Block sizes of the Pallas kernels; None takes the tuned ones.
        expected_rows: Rows that belong to a group in most runs, where a buffer is sized for the
            worst case. The kernels state their cost for that many. None expects all rows.

    Returns:
        (M, N), in the dtype of lhs.

    Raises:
        TPUKernelError: Shapes or dtypes do not match.
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
            f"The Triton kernel of grouped_matmul got lhs {lhs.dtype}{list(lhs.shape)} and rhs "
            f"{list(rhs.shape)}; it takes bfloat16 or float16, rows in "
            f"multiples of {tiles.rows} and both sizes of a weight in multiples of "
            f'{tiles.columns}. implementation="xla" takes any shape.'
        )


def _on_shards(passes: Passes) -> Passes:
    """Run kernels on shards of the rows, of the contraction or of the columns."""

    def forward(
        lhs: jax.Array,
        rhs: jax.Array,
        group_sizes: jax.Array,
        *,
        axes: Assignment | None = None,
        **options: Any,
    ) -> tuple[jax.Array, Residuals]:
        split = dict(axes or {})
        sizes = shard_sizes(group_sizes, lhs.shape[0], split.get("m", ()))
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
        sizes = shard_sizes(group_sizes, lhs.shape[0], split.get("m", ()))
        d_lhs, d_rhs, _ = passes.backward((lhs, rhs, sizes), cotangent, **options)
        return add_up(d_lhs, split.get("n", ())), add_up(d_rhs, split.get("m", ())), None

    return Passes(forward, backward)


PASSES = {
    PALLAS_TPU: _on_shards(Passes(pallas_tpu.forward, pallas_tpu.backward)),
    TRITON: _on_shards(Passes(triton_gpu.forward, triton_gpu.backward)),
    XLA: recomputed(grouped_matmul_xla, constants=1),
    REFERENCE: recomputed(grouped_matmul_reference, constants=1),
}
IMPLEMENTATIONS = {name: with_gradient(OP_NAME, PASSES, name, SPLITS) for name in PASSES}


def _case(name: str, rows: int, width: int, columns: int, groups: int) -> KernelCase:
    return KernelCase(
        name,
        (
            jax.ShapeDtypeStruct((rows, width), jnp.bfloat16),
            jax.ShapeDtypeStruct((groups, width, columns), jnp.bfloat16),
            jax.ShapeDtypeStruct((groups,), jnp.int32),
        ),
    )


def even_groups(case: KernelCase) -> dict[int, Any]:
    """Return group sizes that differ by at most one row."""
    rows, groups = case.arguments[0].shape[0], case.arguments[2].size
    return {2: np.full(groups, rows // groups, np.int32) + (np.arange(groups) < rows % groups)}


OP = Op(
    name=OP_NAME,
    function=grouped_matmul,
    implementations=IMPLEMENTATIONS,
    cases=(
        _case("small", 512, 256, 384, 4),
        _case("mixtral_8x7b", 8192, 4096, 14336, 8),
        _case("qwen3_30b_a3b", 131072, 2048, 768, 128),
        _case("deepseek_v3_16_experts", 131072, 7168, 2048, 16),
    ),
    block_space=block_space,
    vmem_bytes=vmem_bytes,
    default_blocks=default_blocks,
    on_gpu=TRITON,
    differentiable=(0, 1),
    values=even_groups,
    splits=SPLITS,
)


_SUM_OVER_ROWS = RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)


def multiply_groups(
    rows: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    *,
    dtype: Any,
    transposed: bool = False,
    factor: float = 1.0,
    implementation: str | None = None,
    expected_rows: int | None = None,
) -> jax.Array:
    """Multiply 8-bit rows (M, C), sorted by group, by the weight of their group; sum in float32.

    `grouped_matmul` has a gradient and one dtype throughout. With 8-bit operands the gradient has
    other formats than the forward pass, and its caller knows the scales, so this function and
    `sum_groups` have no gradient.

    Args:
        rows: In one 8-bit format; those past the last group give zeros.
        weights: (G, C, N), or (G, N, C) with `transposed`, in the same format or another.
        group_sizes: (G,) integers.
        dtype: Dtype of the result, (M, N).
        transposed: Whether to multiply by transposed weights, for the gradient of rows.
        factor: Multiplies the result before it is rounded to `dtype`.
        implementation: "pallas_tpu" or "xla"; None takes the kernel on TPU.
        expected_rows: As for `grouped_matmul`.
    """
    options = {"dtype": dtype, "transposed": transposed, "factor": factor}
    return _chosen(
        {PALLAS_TPU: grouped_product, XLA: _multiply_xla},
        (rows, weights, group_sizes),
        options,
        implementation,
        expected_rows,
    )


def sum_groups(
    rows: jax.Array,
    others: jax.Array,
    group_sizes: jax.Array,
    scales: jax.Array,
    *,
    dtype: Any,
    implementation: str | None = None,
    expected_rows: int | None = None,
) -> jax.Array:
    """Multiply transposed rows (M, K) by others (M, N), summed by group in float32: (G, K, N).

    The kernel rounds columns to `dtype` and multiplies them by `scales` (1, N) in float32. A
    separate pass would read and write the gradients of all experts once more.
    """
    return _chosen(
        {PALLAS_TPU: grouped_sum, XLA: _sum_xla},
        (rows, others, group_sizes, scales),
        {"dtype": dtype},
        implementation,
        expected_rows,
    )


def _chosen(
    functions: dict[str, Any],
    arrays: tuple[jax.Array, ...],
    options: dict[str, Any],
    implementation: str | None,
    expected_rows: int | None,
) -> jax.Array:
    return dispatch(
        *(OP_NAME, functions, *arrays),
        implementation=implementation,
        on_gpu=XLA,
        elsewhere=XLA,
        options=options,
        pallas_options={"expected_rows": expected_rows},
    )


def _multiply_xla(
    rows: jax.Array,
    weights: jax.Array,
    group_sizes: jax.Array,
    *,
    dtype: Any,
    transposed: bool,
    factor: float,
) -> jax.Array:
    matrices = weights.swapaxes(1, 2) if transposed else weights
    product = jax.lax.ragged_dot(rows, matrices, group_sizes, preferred_element_type=jnp.float32)
    # Rows past the last group are undefined after a ragged matmul.
    return jnp.where(_counted(rows, group_sizes), product * factor, 0).astype(dtype)


def _sum_xla(
    rows: jax.Array, others: jax.Array, group_sizes: jax.Array, scales: jax.Array, *, dtype: Any
) -> jax.Array:
    counted = _counted(rows, group_sizes)
    left, right = (jnp.where(counted, x, jnp.zeros_like(x)) for x in (rows, others))
    summed = jax.lax.ragged_dot_general(
        left, right, group_sizes, _SUM_OVER_ROWS, preferred_element_type=jnp.float32
    )
    return (summed.astype(dtype) * scales).astype(dtype)


def _counted(rows: jax.Array, group_sizes: jax.Array) -> jax.Array:
    return jnp.arange(rows.shape[0])[:, None] < group_sizes.sum()

"""`adaptive_matmul`: one product, in the precision and by the route that suits it."""

from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from ....errors import TPUKernelError, did_you_mean
from ....hardware.target import current_target
from ...partition.splits import Splits
from ...precision import PrecisionConfig
from ...registry.dispatch import dispatch
from ...registry.gradient import with_backward
from ...registry.op import PALLAS_TPU, REFERENCE, XLA, KernelCase
from ...rounding import quantize
from .blocks import GemmBlocks
from .collective import collective_matmul
from .modes import EIGHT_BITS, Mode, check_chip, resolve_mode
from .pallas_tpu import OP_NAME, product
from .reference import reference_product, xla_product
from .tile import Interpret

Strategy: TypeAlias = Literal["auto", "xla", "pallas", "collective"]
PRODUCTS = {PALLAS_TPU: product, XLA: xla_product, REFERENCE: reference_product}
# Of what is summed over each device may have a part: the products are added up.
SPLITS = Splits(free="m n k", arguments=("m k", "k n", "m one", "one n"), result="m n")
COMPUTE = {"bfloat16": "bfloat16", "mixed": "bfloat16", "high": "float32", "fp32": "float32"}
PASSES = {"high": "high", "fp32": "highest"}


def adaptive_matmul(
    a: jax.Array,
    b: jax.Array,
    *,
    precision: str | PrecisionConfig | None = None,
    tpu_strategy: Strategy = "auto",
    mesh: Mesh | AbstractMesh | None = None,
    axis: str | None = None,
    implementation: str | None = None,
    blocks: GemmBlocks | None = None,
) -> jax.Array:
    """`a @ b`, summed in float32 (int8 in int32).

    Args:
        a: (..., K).
        b: (K, N).
        precision: "bfloat16"; "mixed" (bfloat16 with a float32 result); "high" and "highest"
            (float32 in three and six passes); "int8" and "fp8" (rows of a and columns of b are
            rounded by their largest magnitude; gradients ignore the rounding). None takes that of
            the operands: float32 is multiplied in full, and int8 gives int32.
        tpu_strategy: What runs on a TPU; elsewhere it is XLA. "xla"; "pallas" (the tiled kernel);
            "collective" (rows of a and columns of b are split over a mesh axis, and rows travel
            while they are multiplied, anywhere); "auto" takes the kernel for eight bits and XLA,
            which is at the roof, for the rest.
        mesh: Of the collective product; None takes the one in use, that of an operand, or as many
            devices of this process as rows and columns can be split over.
        axis: Of the mesh, for the collective product; None takes its largest.
        implementation: "pallas_tpu", "xla" or "reference", on any platform, instead of a strategy.
        blocks: Of the Pallas kernel; None takes the tuned ones.

    Returns:
        (..., N), in the operands' dtype ("mixed": float32; int8 operands: int32).

    Raises:
        TPUKernelError: Shapes or names that are wrong, or eight bits on a chip that has none.
        MeshError: The collective product's mesh has no such axis.
        ShardingError: Its rows or columns cannot be split.
    """
    if a.ndim < 1 or b.ndim != 2 or a.shape[-1] != b.shape[0]:
        raise TPUKernelError(
            f"gemm multiplies a {a.shape} by b {b.shape}; expected (..., K) and (K, N). For a "
            "batch of b, vmap it."
        )
    mode = resolve_mode(precision, a, b)
    on_tpu = _on_tpu(tpu_strategy, implementation, mode)
    rows = a.reshape(-1, a.shape[-1])

    def multiply(a: jax.Array, b: jax.Array) -> jax.Array:
        return matmul(
            a, b, precision=mode, implementation=implementation, on_tpu=on_tpu, blocks=blocks
        )

    if tpu_strategy == "collective":
        out = collective_matmul(rows, b, mesh=mesh, axis=axis, multiply=multiply)
    else:
        out = multiply(rows, b)
    return out.reshape(*a.shape[:-1], b.shape[1])


def gemm(
    a: jax.Array, b: jax.Array, *, block_size: int | None = None, use_bfloat16: bool = True
) -> jax.Array:
    """`adaptive_matmul` by the names of a BLAS.

    Args:
        a: (..., K).
        b: (K, N).
        block_size: Edge of the Pallas kernel's blocks on a TPU; None leaves the product to XLA,
            which is at the roof (a block of 128 is far below it).
        use_bfloat16: Whether to multiply in bfloat16, or float32 in full.
    """
    blocks = None if block_size is None else GemmBlocks(block_size, block_size, block_size)
    return adaptive_matmul(
        a,
        b,
        precision="bfloat16" if use_bfloat16 else "highest",
        tpu_strategy="auto" if blocks is None else "pallas",
        blocks=blocks,
    )


def matmul(
    a: jax.Array,
    b: jax.Array,
    *,
    precision: Mode,
    implementation: str | None = None,
    on_tpu: str | None = None,
    blocks: GemmBlocks | None = None,
    interpret: Interpret = False,
) -> jax.Array:
    """The product of (M, K) and (K, N) in one mode, with its gradient.

    Raises:
        TPUKernelError: Eight bits on a chip that has none.
    """
    check_chip(precision, current_target())
    given = jnp.promote_types(a.dtype, b.dtype) if a.dtype != b.dtype else a.dtype
    integers = jnp.issubdtype(given, jnp.integer)
    out_dtype = "int32" if integers else "float32" if precision == "mixed" else str(given)
    on_tpu = on_tpu or _usual_on_tpu(precision)
    if precision == "high" and (implementation or on_tpu) == PALLAS_TPU:
        raise TPUKernelError(
            "gemm's Pallas kernel multiplies float32 in one pass or in six; use "
            "precision='highest', or tpu_strategy='xla' for the three passes of 'high'."
        )
    tuned_as = KernelCase("traced", (_shape(a), _shape(b)), {"precision": precision})

    def run(*operands: Any, out_dtype: str, passes: str) -> jax.Array:
        return dispatch(
            OP_NAME,
            PRODUCTS,
            *operands,
            implementation=implementation,
            on_tpu=on_tpu,
            on_gpu=XLA,
            elsewhere=XLA,
            options={"out_dtype": out_dtype, "passes": passes},
            pallas_options={"blocks": blocks, "tuned_as": tuned_as, "interpret": interpret},
            names=SPLITS.alone,
        )

    if integers or (precision == "fp8" and given == EIGHT_BITS["fp8"].name):
        wide = "int32" if integers else "float32"
        return run(a, b, None, None, out_dtype=wide, passes="default")

    def forward(a: jax.Array, b: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        kept = a, b
        if precision in EIGHT_BITS:
            format = EIGHT_BITS[precision]
            (a, a_scales), (b, b_scales) = quantize(a, format, axis=1), quantize(b, format, axis=0)
            out = run(a, b, a_scales, b_scales, out_dtype=out_dtype, passes="default")
            return out, kept
        compute = _compute_dtype(precision, given)
        passes = PASSES.get(precision, "default")
        a, b = a.astype(compute), b.astype(compute)
        return run(a, b, None, None, out_dtype=out_dtype, passes=passes), kept

    def backward(kept: tuple[jax.Array, jax.Array], cotangent: jax.Array) -> tuple[jax.Array, ...]:
        compute = _compute_dtype("bfloat16" if precision in EIGHT_BITS else precision, given)
        a, b = kept
        narrow_a, narrow_b, narrow = (x.astype(compute) for x in (a, b, cotangent))
        options: dict[str, Any] = {
            "passes": PASSES.get(precision, "default"),
            "out_dtype": str(given),
        }
        with jax.named_scope(OP_NAME):
            d_a = xla_product(narrow, narrow_b.T, None, None, **options)
            d_b = xla_product(narrow_a.T, narrow, None, None, **options)
        return d_a.astype(a.dtype), d_b.astype(b.dtype)

    return with_backward(forward, backward, a, b)


def _shape(array: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


def _compute_dtype(mode: str, given: Any) -> Any:
    """What floats are multiplied in; float64 stays where full precision was asked for."""
    wanted = jnp.dtype(COMPUTE[mode])
    return jnp.promote_types(wanted, given) if mode == "fp32" else wanted


def _usual_on_tpu(mode: Mode) -> str:
    return PALLAS_TPU if mode in EIGHT_BITS else XLA


def _on_tpu(strategy: str, implementation: str | None, mode: Mode) -> str:
    known = get_args(Strategy)
    if strategy not in known:
        raise TPUKernelError(
            f"tpu_strategy={strategy!r} is unknown; known are {', '.join(known)}."
            + did_you_mean(strategy, known)
        )
    if strategy in ("auto", "collective"):
        return _usual_on_tpu(mode)
    named = PALLAS_TPU if strategy == "pallas" else XLA
    if implementation not in (None, named):
        raise TPUKernelError(
            f"tpu_strategy={strategy!r} is implementation={named!r}, and {implementation!r} was "
            "asked for as well; give one of them."
        )
    return named

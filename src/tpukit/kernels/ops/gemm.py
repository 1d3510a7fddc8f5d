"""`adaptive_matmul` and `gemm`: one matrix product in a chosen precision, computed by XLA.

XLA reaches the peak rate of the matrix unit at every precision here, so no kernel stands beside it.
"""

from typing import Any, Literal, TypeAlias, cast, get_args

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from ...errors import TPUKernelError, did_you_mean
from ...hardware.formats import FLOAT8_E4M3FN, INT8, NumberFormat, spelled_as
from ...hardware.target import current_target
from ..precision import MODES as FLOAT_MODES
from ..precision import PrecisionConfig, check_product
from ..registry.dispatch import with_backward
from ..rounding import quantize
from .collective_matmul import collective_matmul

Strategy: TypeAlias = Literal["auto", "xla", "collective"]
Mode: TypeAlias = Literal["bfloat16", "mixed", "high", "fp32", "int8", "fp8"]
MODES: tuple[str, ...] = get_args(Mode)
# Formats that the operands are rounded to.
EIGHT_BITS: dict[str, NumberFormat] = {"int8": INT8, "fp8": FLOAT8_E4M3FN}
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
) -> jax.Array:
    """Return `a @ b`, summed in float32 (int8 in int32).

    Args:
        a: (..., K).
        b: (K, N).
        precision: "bfloat16"; "mixed" (bfloat16 with a float32 result); "high" and "highest"
            (float32 in three and six passes); "int8" and "fp8" (rows of a and columns of b are
            rounded by their largest magnitude; gradients ignore the rounding). None takes the
            precision of the operands: float32 is multiplied in full, and int8 gives int32.
        tpu_strategy: "collective" shards the rows of a and the columns of b over a mesh axis and
            overlaps the gather of the rows with the product. "auto" and "xla" are a plain matmul,
            which XLA partitions.
        mesh: For "collective"; None takes the current mesh, that of an operand, or as many
            devices of this process as rows and columns can be sharded over.
        axis: Mesh axis for "collective"; None takes the largest.

    Returns:
        (..., N), in the operands' dtype ("mixed": float32; int8 operands: int32).

    Raises:
        TPUKernelError: Wrong shapes or names, or 8-bit operands on a chip without 8-bit matmul.
        MeshError: The mesh has no such axis.
        ShardingError: The rows or columns do not divide by the axis.
    """
    if a.ndim < 1 or b.ndim != 2 or a.shape[-1] != b.shape[0]:
        raise TPUKernelError(
            f"gemm multiplies a {a.shape} by b {b.shape}; expected (..., K) and (K, N). For a "
            "batch of b, vmap it."
        )
    if tpu_strategy not in get_args(Strategy):
        known = get_args(Strategy)
        raise TPUKernelError(
            f"tpu_strategy={tpu_strategy!r} is unknown; expected one of {', '.join(known)}."
            + did_you_mean(tpu_strategy, known)
        )
    mode = resolve_mode(precision, a, b)
    rows = a.reshape(-1, a.shape[-1])

    def multiply(a: jax.Array, b: jax.Array) -> jax.Array:
        return matmul(a, b, mode)

    if tpu_strategy == "collective":
        out = collective_matmul(rows, b, mesh=mesh, axis=axis, multiply=multiply)
    else:
        out = multiply(rows, b)
    return out.reshape(*a.shape[:-1], b.shape[1])


def gemm(
    a: jax.Array, b: jax.Array, *, block_size: int | None = None, use_bfloat16: bool = True
) -> jax.Array:
    """Call `adaptive_matmul` by the names of a BLAS.

    Args:
        a: (..., K).
        b: (K, N).
        block_size: Accepted and not used: XLA chooses its own tiles, which are faster than any
            one edge length.
        use_bfloat16: Whether to multiply in bfloat16, or float32 in full.
    """
    return adaptive_matmul(a, b, precision="bfloat16" if use_bfloat16 else "highest")


def resolve_mode(precision: str | PrecisionConfig | None, a: jax.Array, b: jax.Array) -> Mode:
    """Return the mode that `precision` names; None takes the mode of the operands' dtype.

    Raises:
        TPUKernelError: Unknown mode, or a floating-point mode for integer operands.
    """
    if jnp.issubdtype(a.dtype, jnp.integer) or jnp.issubdtype(b.dtype, jnp.integer):
        if a.dtype != jnp.int8 or b.dtype != jnp.int8 or precision not in (None, "int8"):
            raise TPUKernelError(
                f"The operands are {a.dtype} and {b.dtype} with precision={precision!r}; an "
                "integer matmul takes int8 with int8 and precision None or 'int8'. Cast them."
            )
        return "int8"
    if precision is None:
        dtype = _joint_dtype(a, b)
        if dtype == jnp.bfloat16:
            return "bfloat16"
        return "fp8" if dtype == FLOAT8_E4M3FN.name else "fp32"
    if isinstance(precision, str):
        known = (*FLOAT_MODES, "int8")
        name = spelled_as(precision, known)
        if name is None:
            raise TPUKernelError(
                f"precision={precision!r} is unknown; expected one of {', '.join(known)}."
                + did_you_mean(precision, known)
            )
        if name == "int8":
            return "int8"
    name = PrecisionConfig.parse(precision).name
    if name not in MODES:
        raise TPUKernelError(f"gemm has no mode {name!r}; expected one of {', '.join(MODES)}.")
    return cast(Mode, name)


def matmul(a: jax.Array, b: jax.Array, mode: Mode) -> jax.Array:
    """Return the product of (M, K) and (K, N) in one mode, with its gradient.

    Raises:
        TPUKernelError: 8-bit operands on a chip without 8-bit matmul.
    """
    if mode in EIGHT_BITS:
        check_product(EIGHT_BITS[mode], current_target())
    dtype = _joint_dtype(a, b)
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    if is_integer or (mode == "fp8" and dtype == EIGHT_BITS["fp8"].name):
        with jax.named_scope("gemm"):
            return _product(a, b, passes="default")
    out_dtype = "float32" if mode == "mixed" else str(dtype)
    passes = PASSES.get(mode, "default")

    def forward(a: jax.Array, b: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        residuals = a, b
        with jax.named_scope("gemm"):
            if mode in EIGHT_BITS:
                format = EIGHT_BITS[mode]
                a, a_scales = quantize(a, format, axis=1)
                b, b_scales = quantize(b, format, axis=0)
                out = _product(a, b, passes="default").astype(jnp.float32) * a_scales * b_scales
            else:
                compute = _compute_dtype(mode, dtype)
                out = _product(a.astype(compute), b.astype(compute), passes=passes)
        return out.astype(out_dtype), residuals

    def backward(
        residuals: tuple[jax.Array, jax.Array], cotangent: jax.Array
    ) -> tuple[jax.Array, ...]:
        compute = _compute_dtype("bfloat16" if mode in EIGHT_BITS else mode, dtype)
        a, b = residuals
        narrow_a, narrow_b, narrow = (x.astype(compute) for x in (a, b, cotangent))
        with jax.named_scope("gemm"):
            d_a = _product(narrow, narrow_b.T, passes=passes).astype(dtype)
            d_b = _product(narrow_a.T, narrow, passes=passes).astype(dtype)
        return d_a.astype(a.dtype), d_b.astype(b.dtype)

    return with_backward(forward, backward, a, b)


def _product(a: jax.Array, b: jax.Array, *, passes: str) -> jax.Array:
    """Multiply, summing integers in int32 and floats in float32, or float64 where they are that."""
    wide = jnp.float64 if a.dtype == jnp.float64 else jnp.float32
    if jnp.issubdtype(a.dtype, jnp.integer):
        wide = jnp.int32
    return jax.lax.dot(a, b, precision=passes, preferred_element_type=wide)


def _joint_dtype(a: jax.Array, b: jax.Array) -> Any:
    # Equal 8-bit floats do not promote, so they are not asked to.
    return jnp.promote_types(a.dtype, b.dtype) if a.dtype != b.dtype else a.dtype


def _compute_dtype(mode: str, given: Any) -> Any:
    """Return the dtype in which floats are multiplied; "fp32" keeps float64."""
    wanted = jnp.dtype(COMPUTE[mode])
    return jnp.promote_types(wanted, given) if mode == "fp32" else wanted

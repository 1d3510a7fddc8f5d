"""Matrices in int8, int4 and fp8: rounded to nearest or by GPTQ, kept as qwix arrays.

`qwix.contrib.gptq_core` unrolls GPTQ input by input, which takes minutes to compile for one matrix;
here it is one loop, and a test compares the numbers. This is the only module that imports qwix's
internals (`qwix._src`, `qwix.contrib`), which may change in any version; tests check every use.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
from jax.scipy.linalg import cho_solve
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from ..errors import MissingExtraError, TPUValidationError, did_you_mean
from ..hardware.stored_formats import WEIGHT_FORMATS
from ..kernels import dequantize, quantized_matmul
from ..kernels.ops.quantized_matmul.weight import (
    INT4_GROUP,
    QuantizedWeight,
    array_bytes,
    pack_weight,
)
from ..models.stored.placement import weight_shardings

DAMPING = 0.01  # of the mean of the Hessian's diagonal, as published


@partial(jax.jit, static_argnames=("bits", "group"))
def gptq_round(
    weight: jax.Array, hessian: jax.Array, *, bits: int, group: int
) -> tuple[jax.Array, jax.Array]:
    """Return int8 values (inputs, outputs) of `bits` bits, and float32 scales (groups, outputs).

    Args:
        weight: (inputs, outputs); `group` divides the inputs.
        hessian: XᵀX of the inputs, at any scale.
        bits: Bits per integer; the range is symmetric.
        group: Inputs that share a scale.
    """
    width, outputs = weight.shape
    most = 2 ** (bits - 1)
    diagonal = jnp.diag(hessian)
    dead = diagonal == 0
    damped = hessian + jnp.diag(jnp.where(dead, 1.0, 0.0) + DAMPING * jnp.mean(diagonal))
    inverse = cho_solve((jnp.linalg.cholesky(damped), True), jnp.eye(width))
    upper = jnp.linalg.cholesky(inverse, upper=True)

    def one_input(at: int, state: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        left, values, scales = state
        first = at // group

        def new_scales() -> jax.Array:
            rows = jax.lax.dynamic_slice(left, (first * group, 0), (group, outputs))
            # Half a step more, as in qwix: the outermost value is as wide as the others.
            largest = jnp.max(jnp.abs(rows), axis=0) / (most - 0.5)
            return scales.at[first].set(jnp.where(largest == 0, 1.0, largest))

        scales = jax.lax.cond(at % group == 0, new_scales, lambda: scales)
        row, scale = left[at], scales[first]
        rounded = jnp.clip(jnp.round(row / scale), -most, most - 1)
        lost = (row - rounded * scale) / upper[at, at]
        left = left - jnp.outer(upper[at], lost)
        return left, values.at[at].set(rounded.astype(jnp.int8)), scales

    start = (
        jnp.where(dead[:, None], 0.0, weight.astype(jnp.float32)),
        jnp.zeros((width, outputs), jnp.int8),
        jnp.zeros((width // group, outputs), jnp.float32),
    )
    _, values, scales = jax.lax.fori_loop(0, width, one_input, start)
    return values, scales


Method: TypeAlias = Literal["nearest", "gptq", "awq"]
METHODS: tuple[str, ...] = get_args(Method)


def quantize_integers(
    weight: jax.Array, format: str, *, hessian: jax.Array | None = None, method: Method = "nearest"
) -> "QuantizedWeight | ScaledInputs":
    """Quantize an (inputs, outputs) matrix to int8, int4 or fp8 in the layout of the kernels.

    Args:
        weight: The matrix.
        format: "int8" or "fp8" with one scale per column, "int4" with one per 128 rows, or another
            of `rounded_formats`.
        hessian: XᵀX of the inputs, at any scale.
        method: "nearest"; "gptq" compensates rounding errors in later rows; "awq" scales rows by
            the size of their inputs. Both need the hessian, and "gptq" needs integers.

    Raises:
        TPUValidationError: The method is unknown or lacks the hessian.
        MissingExtraError: qwix is not installed.
    """
    matrix = jnp.asarray(weight, jnp.float32)
    stored = WEIGHT_FORMATS[format]
    rounded = _rounded(matrix, stored.values.name, stored.block, hessian, method)
    values = rounded.values[: matrix.shape[0]]
    if stored.has_integers:
        values = values.astype(jnp.int8)
    packed = pack_weight(values, rounded.scales, format)
    return packed if rounded.inputs is None else ScaledInputs(packed, rounded.inputs)


def rounded_matrix(
    weight: jax.Array,
    bits: int,
    *,
    group: int = INT4_GROUP,
    hessian: jax.Array | None = None,
    method: Method = "nearest",
) -> tuple[jax.Array, float]:
    """Return a matrix after rounding to 2- to 8-bit integers, and its bits per weight with scales.

    It is for comparisons, because no kernel multiplies 2 or 3 bits. Scales count as float32.
    """
    matrix = jnp.asarray(weight, jnp.float32)
    rounded = _rounded(matrix, f"int{bits}", group, hessian, method)
    rows, columns = matrix.shape
    scales = jnp.repeat(rounded.scales, group, axis=0)[:rows]
    back = rounded.values[:rows].astype(jnp.float32) * scales
    if rounded.inputs is not None:
        back = back / rounded.inputs[:, None]
    total_bits = bits * rows * columns + 32 * rounded.scales.size
    return back, total_bits / (rows * columns)


@partial(jax.tree_util.register_dataclass, data_fields=("weight", "inputs"), meta_fields=())
@dataclass(frozen=True)
class ScaledInputs:
    """A quantized matrix whose inputs are divided by per-input scales (AWQ).

    Attributes:
        weight: The matrix with scaled rows.
        inputs: float32 scales (inputs,).
    """

    weight: QuantizedWeight
    inputs: jax.Array

    @property
    def shape(self) -> tuple[int, int]:
        """(inputs, outputs)."""
        return self.weight.shape

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return array_bytes(self)

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        """Return the dense matrix."""
        return (dequantize(self.weight) / self.inputs[:, None]).astype(dtype)

    def shardings(self, sharding: NamedSharding) -> "ScaledInputs":
        """Return the shardings of its arrays for a sharding of the matrix."""
        inputs = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[:-1]))
        return ScaledInputs(weight_shardings(self.weight, sharding), inputs)  # pyright: ignore[reportArgumentType]

    def __rmatmul__(self, x: Any) -> jax.Array:
        scaled = (jnp.asarray(x) / self.inputs).astype(x.dtype)
        return quantized_matmul(scaled, self.weight)


@dataclass(frozen=True)
class _Rounded:
    """Values (inputs, outputs), scales (groups, outputs), and AWQ's scales of the inputs."""

    values: jax.Array
    scales: jax.Array
    inputs: jax.Array | None


def _rounded(
    matrix: jax.Array, qtype: str, group: int | None, hessian: jax.Array | None, method: str
) -> _Rounded:
    if method not in METHODS:
        raise TPUValidationError(
            f"{method!r} is no rounding method of integers; expected one of {', '.join(METHODS)}."
            + did_you_mean(method, METHODS)
        )
    if method != "nearest" and hessian is None:
        raise TPUValidationError(f"method={method!r} needs the hessian XᵀX of the inputs.")
    if method == "gptq":
        if not qtype.startswith("int"):
            raise TPUValidationError(f"GPTQ rounds to integers, not to {qtype}; use 'nearest'.")
        return _gptq(matrix, hessian, int(qtype.removeprefix("int")), group or matrix.shape[0])
    try:
        from qwix._src.core import qarray
        from qwix.contrib import awq_core
    except ImportError:
        raise MissingExtraError("quant", needed_for="integer weights", module="qwix") from None
    # qwix has outputs first, and groups that divide the inputs.
    missing = -matrix.shape[0] % group if group else 0
    turned = jnp.pad(matrix, ((0, missing), (0, 0))).T
    how = qarray.HowToQuantize(
        qtype=qtype,
        channelwise_axes=(0,),
        tiled_axes={} if group is None else {1: group},
    )
    inputs = None
    if method == "awq":
        assert hessian is not None
        # The root mean square of each input, where qwix's own statistics are mean magnitudes.
        sizes = jnp.pad(jnp.sqrt(jnp.diag(jnp.asarray(hessian, jnp.float32))), (0, missing))
        quantized, scales = awq_core.quantize_weight(turned, sizes, how)
        inputs = scales[0, : matrix.shape[0]].astype(jnp.float32)
    else:
        quantized = qarray.quantize(turned, how)
    return _Rounded(quantized.qvalue.T, quantized.scale.T.astype(jnp.float32), inputs)


def _gptq(matrix: jax.Array, hessian: Any, bits: int, group: int) -> _Rounded:
    missing = -matrix.shape[0] % group
    padded = jnp.pad(matrix, ((0, missing), (0, 0)))
    square = jnp.pad(jnp.asarray(hessian, jnp.float32), ((0, missing), (0, missing)))
    values, scales = gptq_round(padded, square, bits=bits, group=group)
    return _Rounded(values, scales, None)

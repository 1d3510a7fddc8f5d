"""Integer and fp8 matrices by qwix: to nearest and AWQ; GPTQ by our own loop.

The one module that imports qwix's internals.

`qwix._src` and `qwix.contrib` promise nothing from version to version; tests hold what is used
here to numbers of their own.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from ...errors import MissingExtraError, TPUValidationError, did_you_mean
from ...hardware.formats import FLOAT8_E4M3FN
from ...kernels import dequantize, quantized_matmul
from ...kernels.ops.quantized_matmul.packing import INT4_GROUP, pack_fp8, pack_int4, pack_int8
from ...kernels.ops.quantized_matmul.weight import QuantizedWeight, array_bytes
from ...models.stored.placement import weight_shardings
from .gptq import gptq_round

Method: TypeAlias = Literal["nearest", "gptq", "awq"]
METHODS: tuple[str, ...] = get_args(Method)
_QTYPES = {"int8": "int8", "int4": "int4", "fp8": FLOAT8_E4M3FN.name}


def quantize_integers(
    weight: jax.Array, format: str, *, hessian: jax.Array | None = None, method: Method = "nearest"
) -> "QuantizedWeight | ScaledInputs":
    """An (inputs, outputs) matrix in int8, int4 or fp8, as the kernels keep it.

    Args:
        weight: The matrix.
        format: "int8" or "fp8", with a scale for each column, or "int4", one for each 128 rows.
        hessian: XᵀX of the inputs, of any scale.
        method: "nearest"; "gptq" spreads what rounding loses over later rows; "awq" scales rows
            by how large their inputs are. Both need the hessian, and "gptq" integers.

    Raises:
        TPUValidationError: The method is unknown or lacks the hessian.
        MissingExtraError: qwix is not installed.
    """
    matrix = jnp.asarray(weight, jnp.float32)
    group = INT4_GROUP if format == "int4" else None
    found = _rounded(matrix, _QTYPES[format], group, hessian, method)
    rows, columns = matrix.shape
    values, scales = found.values[:rows], found.scales
    if format == "int4":
        packed = pack_int4(values.astype(jnp.int8), scales)
    elif format == "int8":
        packed = pack_int8(values.astype(jnp.int8), scales[0])
    else:
        packed = pack_fp8(values, scales[0])
    assert packed.shape == (rows, columns)
    return packed if found.inputs is None else ScaledInputs(packed, found.inputs)


def rounded_matrix(
    weight: jax.Array,
    bits: int,
    *,
    group: int = INT4_GROUP,
    hessian: jax.Array | None = None,
    method: Method = "nearest",
) -> tuple[jax.Array, float]:
    """What a matrix of 2- to 8-bit integers stands for, and its bits a weight, scales included.

    For comparisons: no kernel multiplies 2 or 3 bits. Scales are counted in float32.
    """
    matrix = jnp.asarray(weight, jnp.float32)
    found = _rounded(matrix, f"int{bits}", group, hessian, method)
    rows, columns = matrix.shape
    scales = jnp.repeat(found.scales, group, axis=0)[:rows]
    back = found.values[:rows].astype(jnp.float32) * scales
    if found.inputs is not None:
        back = back / found.inputs[:, None]
    whole = bits * rows * columns + 32 * found.scales.size
    return back, whole / (rows * columns)


@partial(jax.tree_util.register_dataclass, data_fields=("weight", "inputs"), meta_fields=())
@dataclass(frozen=True)
class ScaledInputs:
    """A quantized matrix whose inputs are divided by scales of their own first (AWQ).

    Attributes:
        weight: Of the scaled rows.
        inputs: float32 (inputs,).
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
        """The matrix it stands for."""
        return (dequantize(self.weight) / self.inputs[:, None]).astype(dtype)

    def shardings(self, sharding: NamedSharding) -> "ScaledInputs":
        """Those of its arrays, from that of its matrix; a stack's has its leading axis first."""
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
            f"{method!r} is no way to round integers; known are {', '.join(METHODS)}."
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
        found, scales = awq_core.quantize_weight(turned, sizes, how)
        inputs = scales[0, : matrix.shape[0]].astype(jnp.float32)
    else:
        found = qarray.quantize(turned, how)
    return _Rounded(found.qvalue.T, found.scale.T.astype(jnp.float32), inputs)


def _gptq(matrix: jax.Array, hessian: Any, bits: int, group: int) -> _Rounded:
    missing = -matrix.shape[0] % group
    padded = jnp.pad(matrix, ((0, missing), (0, 0)))
    square = jnp.pad(jnp.asarray(hessian, jnp.float32), ((0, missing), (0, missing)))
    values, scales = gptq_round(padded, square, bits=bits, group=group)
    return _Rounded(values, scales, None)

"""`VQArray`: a matrix as codes of a codebook, its Hadamard rotation, and its sharding.

The rotation spreads outliers over all rows. R = H·diag(signs) with H orthogonal, so
x·W = (x·Rᵀ)·(R·W). If the width is no power of two, H is block-diagonal with blocks of the largest
power of two that divides it.
"""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from ...annotations import PyTree
from ...errors import ShardingError, TPUKernelError, TPUValidationError
from ...kernels import pack_vq, quantized_matmul
from ...kernels.hadamard import block_size, hadamard
from ...kernels.ops.quantized_matmul.weight import array_bytes
from ...plain_data import JsonObject
from ...shown import Shown
from ..codebooks.codebook import Codebook, code_dtype
from ..formats import TRELLIS_BITS, CodeLayout, VQFormat
from .trellis import pack_bits, run_length, unpack_bits, windows_of

# Below this a block mixes too few rows to be worth anything.
_LEAST_BLOCK = 8


def random_signs(width: int, seed: int) -> jax.Array:
    """Return random signs, int8 (width,).

    Raises:
        TPUValidationError: The largest power of two that divides the width is too small.
    """
    if block_size(width) < _LEAST_BLOCK:
        raise TPUValidationError(
            f"A Hadamard rotation of {width} rows mixes blocks of {block_size(width)}; the width "
            f"must be a multiple of {_LEAST_BLOCK}. Leave hadamard out for this matrix."
        )
    return jax.random.rademacher(jax.random.key(seed), (width,), jnp.int8)


@partial(jax.jit, static_argnames="axis")
def rotate(x: jax.Array, signs: jax.Array, *, axis: int = 0) -> jax.Array:
    """Return R times the vectors along an axis, in x's dtype."""
    moved = jnp.moveaxis(x, axis, -1) * signs.astype(x.dtype)
    return jnp.moveaxis(hadamard(moved), -1, axis)


@partial(jax.jit, static_argnames="axis")
def rotate_back(x: jax.Array, signs: jax.Array, *, axis: int = 0) -> jax.Array:
    """Return Rᵀ times the vectors along an axis, the inverse of `rotate`."""
    moved = hadamard(jnp.moveaxis(x, axis, -1)) * signs.astype(x.dtype)
    return jnp.moveaxis(moved, -1, axis)


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("codes", "entries", "scales", "signs"),
    meta_fields=("shape", "layout"),
)
@dataclass(frozen=True)
class VQArray(Shown):
    """A vector-quantized (in, out) matrix, whose columns are output channels.

    The arrays shard as the matrix does: codes by (in / length, out), scales by out; entries and
    signs stay whole. A stack of matrices is a `VQArray` whose arrays have a leading axis, for
    `jax.vmap` and `jax.lax.scan` to take apart.

    Attributes:
        codes: (stages, ⌈in / length⌉, out), uint8 or uint16, one per `length` rows of a column. For
            a trellis uint8 (1, in, bytes): the new bits of each row, run by run.
        entries: (stages, entries, length) int8, summed over stages.
        scales: bfloat16 (out,), factors of the entries.
        signs: int8 (in,) of the random Hadamard rotation of the rows, or None.
        shape: (in, out).
        layout: "tpu_lane_i32" if the fused kernel reads it, "trellis2" and the like, or "plain".
    """

    codes: jax.Array
    entries: jax.Array
    scales: jax.Array
    signs: jax.Array | None
    shape: tuple[int, int]
    layout: CodeLayout

    # numpy arrays leave the product to `__rmatmul__`.
    __array_ufunc__ = None

    @property
    def ndim(self) -> int:
        """Always 2."""
        return 2

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the decoded matrix."""
        return jnp.dtype(jnp.float32)

    @property
    def format(self) -> VQFormat:
        """Length, entries and stages."""
        stages, entries, length = self.entries.shape[-3:]
        bits = TRELLIS_BITS.get(self.layout, 0)
        return VQFormat(length=length, entries=entries, stages=stages, trellis=bits)

    @property
    def codebook(self) -> Codebook:
        """The codebook, in units of the column scales."""
        return Codebook(self.entries, jnp.float32(1))

    @property
    def nbytes(self) -> int:
        """Bytes of codes, entries, scales and signs in memory."""
        return array_bytes(self)

    @property
    def bits_per_weight(self) -> float:
        """Bits per weight in memory, with all arrays."""
        matrices = math.prod(self.codes.shape[:-3])
        return 8 * self.nbytes / (matrices * self.shape[0] * self.shape[1])

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        """Return the dense (in, out) matrix."""
        return _dequantized(self, jnp.dtype(dtype))

    def rotated_rows(self) -> jax.Array:
        """Return the decoded float32 (in, out), before the rotation is undone."""
        if self.layout in TRELLIS_BITS:
            return self._decoded_trellis()
        take = jax.vmap(lambda table, codes: table[codes.astype(jnp.int32)])
        # Of integers as floats the sum over stages is exact, and entries can be trained.
        vectors = take(self.entries.astype(jnp.float32), self.codes).sum(0)
        rows = vectors.swapaxes(1, 2).reshape(-1, self.codes.shape[2])[: self.shape[0]]
        return rows * self.scales.astype(jnp.float32)

    def opened(self) -> "VQArray":
        """Return the matrix with one code per weight in place of trellis bits.

        It is larger but decodes in one look-up, for repeated decoding.
        """
        return self if self.layout not in TRELLIS_BITS else _opened(self)

    def choices(self) -> jax.Array:
        """Return int32 (stages, blocks, out): the entry of each block of rows, with padded runs."""
        if self.layout not in TRELLIS_BITS:
            return self.codes.astype(jnp.int32)
        bits, window = TRELLIS_BITS[self.layout], (self.entries.shape[1] - 1).bit_length()
        symbols = unpack_bits(self.codes[0], bits)
        runs = symbols.reshape(self.shape[0], -1, run_length(self.shape[1]))
        return windows_of(runs, bits=bits, window=window).reshape(1, self.shape[0], -1)

    def with_choices(self, choices: jax.Array) -> "VQArray":
        """Return the array with other choices of entries; the inverse of `choices`."""
        if self.layout not in TRELLIS_BITS:
            return replace(self, codes=choices.astype(self.codes.dtype))
        bits = TRELLIS_BITS[self.layout]
        return replace(self, codes=pack_bits(choices & (2**bits - 1), bits))

    def _decoded_trellis(self) -> jax.Array:
        values = self.entries[0, :, 0][self.choices()[0, :, : self.shape[1]]]
        return values.astype(jnp.float32) * self.scales.astype(jnp.float32)

    def shardings(self, sharding: NamedSharding) -> "VQArray":
        """Return the shardings of its arrays; see `array_shardings`."""
        return array_shardings(self, sharding)

    def __rmatmul__(self, x: Any) -> jax.Array:
        x = jnp.asarray(x)
        if x.shape[-1] != self.shape[0]:
            raise TPUKernelError(
                f"x is {x.shape} and the weight {self.shape}; the last axis of x must have "
                f"{self.shape[0]} elements."
            )
        if self.signs is not None:
            x = rotate(x, self.signs, axis=-1)
        if self.layout == "tpu_lane_i32":
            packed = replace(pack_vq(self.codes, self.entries, self.scales), shape=self.shape)
            return quantized_matmul(x, packed)
        return x @ self.rotated_rows().astype(x.dtype)

    def __matmul__(self, other: PyTree) -> jax.Array:
        return self.dequantize() @ other

    def to_dict(self) -> JsonObject:
        """Return format, shape and size as plain data."""
        return {
            "format": self.format.name,
            "shape": list(self.shape),
            "layout": self.layout,
            "rotated": self.signs is not None,
            "nbytes": self.nbytes,
            "bits_per_weight": self.bits_per_weight,
        }

    def __rich__(self) -> str:
        return (
            f"{self.format.name} matrix {self.shape[0]}×{self.shape[1]}: "
            f"{self.bits_per_weight:.2f} bits a weight, {self.nbytes:,} bytes"
        )


@partial(jax.jit, static_argnames="dtype")
def _dequantized(array: VQArray, dtype: Any) -> jax.Array:
    matrix = array.rotated_rows()
    if array.signs is not None:
        matrix = rotate_back(matrix, array.signs)
    return matrix.astype(dtype)


@jax.jit
def _opened(trellis: VQArray) -> VQArray:
    codes = trellis.choices()[..., : trellis.shape[1]]
    dtype = code_dtype(trellis.entries.shape[1])
    return replace(trellis, codes=codes.astype(dtype), layout="plain")


def array_shardings(array: VQArray, sharding: NamedSharding) -> VQArray:
    """Return a `VQArray` of shardings, for `jax.device_put` and `jax.jit`.

    Args:
        array: A `VQArray` of arrays or of shapes.
        sharding: Sharding of the (in, out) matrix; for a stack with its leading axes first.

    Raises:
        ShardingError: A shard boundary would split a vector or a trellis run.
    """
    leading = array.codes.ndim - 3
    spec = (*sharding.spec, *(None,) * (leading + 2 - len(sharding.spec)))
    first, (tall, wide) = spec[:leading], spec[leading:]
    length = array.entries.shape[-1]
    _check(array, sharding, tall, array.codes.shape[-2], f"vectors of {length} rows")
    if array.layout in TRELLIS_BITS:
        run = run_length(array.shape[1])
        _check(array, sharding, wide, -(-array.shape[1] // run), f"runs of {run} columns")
    _check(array, sharding, wide, array.shape[1], "columns")

    def at(*axes: Any) -> Any:
        return NamedSharding(sharding.mesh, PartitionSpec(*first, *axes))

    return replace(
        array,
        codes=at(None, tall, wide),
        entries=at(),
        scales=at(wide),
        signs=None if array.signs is None else at(),
    )


def place_array(array: VQArray, sharding: NamedSharding) -> VQArray:
    """Put an array's parts on devices by the sharding of its matrix.

    Raises:
        ShardingError: A shard boundary would split a vector or a trellis run.
    """
    return jax.device_put(array, array_shardings(array, sharding))


def _check(array: VQArray, sharding: NamedSharding, axes: Any, count: int, what: str) -> None:
    names = () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)
    pieces = 1
    for name in names:
        pieces *= sharding.mesh.shape[name]
    if count % pieces:
        raise ShardingError(
            f"A {array.format.name} matrix {array.shape} has {count} {what}, which {pieces} "
            f"devices of {' × '.join(names)} cannot share evenly; split another axis, or by a "
            f"divisor of {count}."
        )

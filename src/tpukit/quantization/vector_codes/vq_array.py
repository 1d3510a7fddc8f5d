"""`VQArray`: a weight matrix as codes, a codebook and a scale for each column; it multiplies."""

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.typing import DTypeLike

from ...errors import TPUKernelError
from ...kernels import pack_vq, quantized_matmul
from ...kernels.ops.quantized_matmul.weight import array_bytes
from ...shown import Shown
from ..codebooks.codebook import Codebook, code_dtype
from ..formats import TRELLIS_BITS, CodeLayout, VQFormat
from .rotation import rotate, rotate_back
from .trellis import pack_bits, run_length, unpack_bits, windows_of


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
        codes: (stages, ⌈in / length⌉, out), uint8 or uint16; each for `length` rows of a column. Of
            a trellis uint8 (1, in, bytes): the new bits of each row, runs of columns one after
            another.
        entries: (stages, entries, length) int8, summed over stages.
        scales: bfloat16 (out,), what entries are multiplied with.
        signs: int8 (in,) of the random Hadamard rotation that rows went through, or None.
        shape: (in, out).
        layout: "tpu_lane_i32" where the fused kernel reads it, "trellis2" and the like, or "plain".
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
        """2: it is a matrix."""
        return 2

    @property
    def dtype(self) -> np.dtype[Any]:
        """What it is decoded to unless asked otherwise."""
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
        """Bytes of codes, entries, scales and signs as they lie in memory."""
        return array_bytes(self)

    @property
    def bits_per_weight(self) -> float:
        """Bits in memory for each weight, all of the arrays counted."""
        matrices = math.prod(self.codes.shape[:-3])
        return 8 * self.nbytes / (matrices * self.shape[0] * self.shape[1])

    def dequantize(self, dtype: DTypeLike = jnp.float32) -> jax.Array:
        """The (in, out) matrix it stands for."""
        return _dequantized(self, jnp.dtype(dtype))

    def rotated_rows(self) -> jax.Array:
        """float32 (in, out) as codes say it, before any rotation back."""
        if self.layout in TRELLIS_BITS:
            return self._decoded_trellis()
        take = jax.vmap(lambda table, codes: table[codes.astype(jnp.int32)])
        # Of integers as floats the sum over stages is exact, and entries can be trained.
        found = take(self.entries.astype(jnp.float32), self.codes).sum(0)
        rows = found.swapaxes(1, 2).reshape(-1, self.codes.shape[2])[: self.shape[0]]
        return rows * self.scales.astype(jnp.float32)

    def opened(self) -> "VQArray":
        """The same matrix with a code for each weight, where codes are bits of a trellis.

        It is larger, and decoded in one look-up: for those who decode it often.
        """
        return self if self.layout not in TRELLIS_BITS else _opened(self)

    def choices(self) -> jax.Array:
        """int32 (stages, blocks, out): which entry each block of rows has; runs are whole."""
        if self.layout not in TRELLIS_BITS:
            return self.codes.astype(jnp.int32)
        bits, window = TRELLIS_BITS[self.layout], (self.entries.shape[1] - 1).bit_length()
        symbols = unpack_bits(self.codes[0], bits)
        runs = symbols.reshape(self.shape[0], -1, run_length(self.shape[1]))
        return windows_of(runs, bits=bits, window=window).reshape(1, self.shape[0], -1)

    def with_choices(self, choices: jax.Array) -> "VQArray":
        """The same with other entries chosen; the opposite of `choices`."""
        if self.layout not in TRELLIS_BITS:
            return replace(self, codes=choices.astype(self.codes.dtype))
        bits = TRELLIS_BITS[self.layout]
        return replace(self, codes=pack_bits(choices & (2**bits - 1), bits))

    def _decoded_trellis(self) -> jax.Array:
        values = self.entries[0, :, 0][self.choices()[0, :, : self.shape[1]]]
        return values.astype(jnp.float32) * self.scales.astype(jnp.float32)

    def shardings(self, sharding: NamedSharding) -> "VQArray":
        """Those of its arrays, from that of its matrix; see `placement.array_shardings`."""
        from .placement import array_shardings  # which imports this module

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

    def __matmul__(self, other: Any) -> jax.Array:
        return self.dequantize() @ other

    def to_dict(self) -> dict[str, Any]:
        """Format, shape and size."""
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

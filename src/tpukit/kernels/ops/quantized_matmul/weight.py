"""`QuantizedWeight`: a matrix in int8, int4, fp8 or vector-quantized form, as kernels read it.

Formats of a (K, N) matrix whose columns are output channels. K is padded to a multiple of 128.

| format | data | scales | codebook |
|---|---|---|---|
| int8 | int8 (K, N) | (1, N) | |
| fp8 | float8_e4m3fn (K, N) | (1, N) | |
| int4 | int32 words (K/8, N): rows 8r … 8r+7, the lowest bits first | (K/group, N) | |
| vq | uint8 codes (stages, K/4, N), each for 4 rows of a column | (1, N) | int32 words \
(stages, entries/128, 128): 4 int8 values, the lowest bits first |

Words of 32 bits are what the TPU's lane gather moves and what `bitcast` spreads over rows, so a
kernel reads both packings without a shuffle.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias, get_args

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ....annotations import PyTree
from ....errors import TPUKernelError, did_you_mean
from ....hardware.formats import INT8
from ....hardware.stored_formats import WEIGHT_FORMATS, StoredFormat
from ....plain_data import JsonObject
from ....shown import Shown
from ...blocks.tiling import LANES
from ...rounding import decode, quantize

VQ_LENGTH = WEIGHT_FORMATS["vq"].group


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("data", "scales", "codebook"),
    meta_fields=("format", "shape"),
)
@dataclass(frozen=True)
class QuantizedWeight(Shown):
    """A quantized (K, N) matrix; the module's table describes the arrays.

    Attributes:
        data: Values, packed values or codes.
        scales: float32 factors of the values.
        codebook: The codebook of "vq", else None.
        format: "int8", "int4", "fp8" or "vq", or another name in `WEIGHT_FORMATS`.
        shape: (K, N) before padding.
    """

    data: jax.Array
    scales: jax.Array
    codebook: jax.Array | None
    format: str
    shape: tuple[int, int]

    @property
    def stored_format(self) -> StoredFormat:
        """The format of that name."""
        return WEIGHT_FORMATS[self.format]

    @property
    def group(self) -> int:
        """How many rows share a scale; all of them except for int4."""
        return padded_rows(self.format, self.data) // self.scales.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of data, scales and codebook together."""
        return array_bytes(self)

    @property
    def bits_per_weight(self) -> float:
        """Bits of storage per weight, including padding, scales and codebook."""
        return 8 * self.nbytes / (self.shape[0] * self.shape[1])

    def to_dict(self) -> JsonObject:
        """Return format, shape and size."""
        return {
            "format": self.format,
            "shape": list(self.shape),
            "group": self.group,
            "entries": None if self.codebook is None else self.codebook.shape[1] * LANES,
            "stages": None if self.codebook is None else self.codebook.shape[0],
            "nbytes": self.nbytes,
            "bits_per_weight": self.bits_per_weight,
        }

    def __rich__(self) -> str:
        return (
            f"{self.format} matrix {self.shape[0]}×{self.shape[1]}: "
            f"{self.bits_per_weight:.2f} bits per weight, {self.nbytes:,} bytes"
        )


def array_bytes(tree: PyTree) -> int:
    """Return the bytes of all arrays of a tree."""
    leaves: list[Any] = jax.tree.leaves(tree)
    return sum(leaf.size * jnp.dtype(leaf.dtype).itemsize for leaf in leaves)


def padded_rows(format: str, data: Any) -> int:
    """Return K of the matrix, including padding."""
    return data.shape[-2] * WEIGHT_FORMATS[format].values_per_element


def check_format(name: str) -> None:
    """Raise unless `name` is a format.

    Raises:
        TPUKernelError: It is not; the message names the formats.
    """
    known = [known for known, format in WEIGHT_FORMATS.items() if format.scales is not None]
    if name not in known:
        raise TPUKernelError(
            f"Weight format {name!r} is unknown; known are {', '.join(known)}."
            + did_you_mean(name, known)
        )


Activations: TypeAlias = Literal["bfloat16", "int8"]


def quantize_rows(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return int8 values of (M, K) and float32 (M, 1) scales, by each row's largest magnitude."""
    return quantize(x, INT8, axis=-1)


def check_activations(activations: str, format: str) -> None:
    """Raise if weights of `format` cannot be multiplied with such activations.

    Raises:
        TPUKernelError: An unknown name, or int8 with fp8 weights.
    """
    known = get_args(Activations)
    if activations not in known:
        raise TPUKernelError(
            f"activations={activations!r} are unknown; known are {', '.join(known)}."
            + did_you_mean(activations, known)
        )
    if activations == INT8.name and not WEIGHT_FORMATS[format].has_integers:
        raise TPUKernelError(
            f"{format} weights are not integers, so int8 activations cannot multiply them; use "
            "activations='bfloat16', or weights in int8, int4 or vq."
        )


INT4_GROUP = WEIGHT_FORMATS["int4"].block or LANES
# With more entries a code needs more than a byte; with fewer than 128 a gather is not cheaper.
VQ_ENTRIES = (128, 256)


def pack_weight(
    values: jax.Array, scales: jax.Array, format: str, *, group: int | None = None
) -> QuantizedWeight:
    """Pack rounded (K, N) values with a scale per column, or per group of rows and column.

    Args:
        values: Values to pack; those outside of the format's range lose their upper bits.
        scales: (groups, N); one group for formats with a scale per column.
        format: A name in `WEIGHT_FORMATS`.
        group: Rows that share a scale, a multiple of 128; the format's own by default.
    """
    stored = WEIGHT_FORMATS[format]
    _expect(values, INT8.name if stored.is_packed else stored.values.container, "values", 2)
    group = group or stored.block
    if group is not None and group % LANES:
        raise TPUKernelError(f"group={group} must be a multiple of {LANES}.")
    rows, columns = values.shape
    _expect_shape(scales, (1 if group is None else -(-rows // group), columns), "scales")
    padded = _pad_rows(values, math.lcm(stored.multiple, group or 1))
    if group is not None:
        scales = _pad_rows(scales, padded.shape[0] // group)
    wide = scales.astype(jnp.float32)
    return QuantizedWeight(stored.pack(padded), wide, None, format, (rows, columns))


def pack_int8(values: jax.Array, scales: jax.Array) -> QuantizedWeight:
    """Pack int8 (K, N) values with a scale per column (N,)."""
    _expect_shape(scales, (values.shape[-1],), "scales")
    return pack_weight(values, scales[None], "int8")


def pack_fp8(values: jax.Array, scales: jax.Array) -> QuantizedWeight:
    """Pack float8_e4m3fn (K, N) values with a scale per column (N,)."""
    _expect_shape(scales, (values.shape[-1],), "scales")
    return pack_weight(values, scales[None], "fp8")


def pack_int4(values: jax.Array, scales: jax.Array, *, group: int = INT4_GROUP) -> QuantizedWeight:
    """Pack int8 (K, N) values in -8 … 7, eight per word.

    Args:
        values: Values to pack; those outside -8 … 7 lose their upper bits.
        scales: (groups, N), one per group of rows.
        group: Rows that share a scale, a multiple of 128.
    """
    return pack_weight(values, scales, "int4", group=group)


def pack_vq(codes: jax.Array, codebook: jax.Array, scales: jax.Array) -> QuantizedWeight:
    """Pack a vector-quantized weight: every 4 rows of a column are an entry of a codebook.

    Args:
        codes: uint8 (stages, K/4, N); the entries of several stages are added.
        codebook: int8 (stages, entries, 4), of 128 or 256 entries.
        scales: (N,) of the columns.
    """
    _expect(codes, jnp.uint8, "codes", 3)
    _expect(codebook, jnp.int8, "codebook", 3)
    stages, entries, length = codebook.shape
    if entries not in VQ_ENTRIES or length != VQ_LENGTH or stages != codes.shape[0]:
        raise TPUKernelError(
            f"The codebook is {codebook.shape} for codes of {codes.shape[0]} stages; expected "
            f"({codes.shape[0]}, entries, {VQ_LENGTH}) with {' or '.join(map(str, VQ_ENTRIES))} "
            "entries."
        )
    _expect_shape(scales, (codes.shape[2],), "scales")
    words = jax.lax.bitcast_convert_type(codebook, jnp.int32)
    return QuantizedWeight(
        _pad_rows(codes, LANES // VQ_LENGTH),
        scales[None].astype(jnp.float32),
        words.reshape(stages, entries // LANES, LANES),
        "vq",
        (codes.shape[1] * VQ_LENGTH, codes.shape[2]),
    )


def unpack(weight: QuantizedWeight) -> tuple[jax.Array, ...]:
    """Return the arrays that the format's `pack_…` function was given."""
    rows = weight.shape[0]
    if weight.codebook is not None:
        entries = jax.lax.bitcast_convert_type(weight.codebook, jnp.int8)
        codebook = entries.reshape(weight.codebook.shape[0], -1, VQ_LENGTH)
        return weight.data[:, : rows // VQ_LENGTH], codebook, weight.scales[0]
    stored = weight.stored_format
    scales = weight.scales[0] if stored.block is None else weight.scales
    return stored.unpack(weight.data)[:rows], scales


def decode_vq(codes: jax.Array, codebook: jax.Array) -> jax.Array:
    """Return int32 (K, N) sums over stages of codes (stages, K/4, N) and a codebook of words."""
    entries = jax.lax.bitcast_convert_type(codebook, jnp.int8).astype(jnp.int32)
    table = entries.reshape(codebook.shape[0], -1, VQ_LENGTH)
    values = jax.vmap(lambda table, codes: table[codes.astype(jnp.int32)])(table, codes).sum(0)
    return values.swapaxes(1, 2).reshape(-1, codes.shape[2])


def dequantize(weight: QuantizedWeight, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """Return the (K, N) matrix that the weight represents."""
    values = dequantize_arrays(
        weight.data, weight.scales, weight.codebook, format=weight.format, dtype=dtype
    )
    return values[: weight.shape[0]]


def dequantize_arrays(
    data: jax.Array, scales: jax.Array, codebook: jax.Array | None, *, format: str, dtype: DTypeLike
) -> jax.Array:
    """Return the matrix of a weight given by its arrays, including padding."""
    stored = WEIGHT_FORMATS[format]
    values = stored.unpack(data) if codebook is None else decode_vq(data, codebook)
    grouped = values.reshape(scales.shape[0], -1, values.shape[1])
    return decode(grouped, scales[:, None], dtype).reshape(values.shape)


def quantize_weight(w: jax.Array, format: str, *, group: int | None = None) -> QuantizedWeight:
    """Round a float (K, N) matrix to the nearest values of a format, by its largest magnitudes.

    Args:
        w: The matrix.
        format: "int8" or "fp8" (a scale per column), "int4" (one per group of rows), or another
            format in `WEIGHT_FORMATS` that has scales and no codebook.
        group: Rows that share a scale, a multiple of 128, in formats with a scale per group; the
            format's own by default.

    Raises:
        TPUKernelError: The format is unknown, or "vq", whose codebook must be fitted first.
    """
    check_format(format)
    stored = WEIGHT_FORMATS[format]
    if stored.has_codebook:
        raise TPUKernelError(
            "A vector-quantized weight needs a codebook fitted to the matrix; fit one and call "
            "pack_vq, or take format='int4'."
        )
    rows, columns = w.shape
    group = None if stored.block is None else group or stored.block
    padded = _pad_rows(w.astype(jnp.float32), math.lcm(stored.multiple, group or 1))
    by_group = padded.reshape(-1, group or padded.shape[0], columns)
    values, scales = quantize(by_group, stored.values, axis=-2)
    if stored.is_packed:
        values = values.astype(jnp.int8)
    values = values.reshape(-1, columns)[:rows]
    groups = 1 if group is None else -(-rows // group)
    return pack_weight(values, scales[:groups, 0], format, group=group)


def _pad_rows(values: jax.Array, multiple: int = LANES) -> jax.Array:
    missing = -values.shape[-2] % multiple
    room = [(0, 0)] * (values.ndim - 2) + [(0, missing), (0, 0)]
    return jnp.pad(values, room) if missing else values


def _expect(array: jax.Array, dtype: DTypeLike, name: str, rank: int) -> None:
    if array.dtype != dtype or array.ndim != rank:
        raise TPUKernelError(
            f"{name} are {array.dtype}{list(array.shape)}; expected {jnp.dtype(dtype).name} with "
            f"{rank} dimensions."
        )


def _expect_shape(array: jax.Array, shape: tuple[int, ...], name: str) -> None:
    if array.shape != shape:
        raise TPUKernelError(f"{name} are {array.shape}; expected {shape}.")

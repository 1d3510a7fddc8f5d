"""Packing values into a `QuantizedWeight` and back, exactly; and rounding a matrix to one."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ....errors import TPUKernelError
from ....hardware.formats import FLOAT8_E4M3FN
from ....hardware.stored_formats import WEIGHT_FORMATS
from ...blocks.tiling import LANES, round_up
from ...rounding import decode, quantize
from .weight import INT4_PER_WORD, VQ_LENGTH, QuantizedWeight, WeightFormat, check_format

INT4_GROUP = WEIGHT_FORMATS["int4"].block or LANES
# Past this many entries a code needs more than a byte; below 128 a gather costs the same.
VQ_ENTRIES = (128, 256)


def pack_int8(values: jax.Array, scales: jax.Array) -> QuantizedWeight:
    """A weight of int8 (K, N) values with a scale for each column (N,)."""
    _expect(values, jnp.int8, "values", 2)
    _expect_shape(scales, (values.shape[1],), "scales")
    padded = _pad_rows(values)
    return QuantizedWeight(padded, scales[None].astype(jnp.float32), None, "int8", _shape(values))


def pack_fp8(values: jax.Array, scales: jax.Array) -> QuantizedWeight:
    """A weight of float8_e4m3fn (K, N) values with a scale for each column (N,)."""
    _expect(values, FLOAT8_E4M3FN.name, "values", 2)
    _expect_shape(scales, (values.shape[1],), "scales")
    padded = _pad_rows(values)
    return QuantizedWeight(padded, scales[None].astype(jnp.float32), None, "fp8", _shape(values))


def pack_int4(values: jax.Array, scales: jax.Array, *, group: int = INT4_GROUP) -> QuantizedWeight:
    """A weight of int8 (K, N) values in -8 … 7, eight to a word.

    Args:
        values: What to pack; anything outside -8 … 7 loses its upper bits.
        scales: (groups, N), one for each group of rows.
        group: Rows that share a scale, a multiple of 128.
    """
    _expect(values, jnp.int8, "values", 2)
    if group % LANES:
        raise TPUKernelError(f"group={group} is no multiple of {LANES}, as the kernel needs it.")
    padded = _pad_rows(values, group)
    rows, columns = padded.shape
    _expect_shape(scales, (rows // group, columns), "scales")
    nibbles = padded.reshape(rows // INT4_PER_WORD, INT4_PER_WORD, columns).astype(jnp.uint32) & 15
    shifts = 4 * jnp.arange(INT4_PER_WORD, dtype=jnp.uint32)[:, None]
    words = (nibbles << shifts).sum(1, dtype=jnp.uint32)
    packed = jax.lax.bitcast_convert_type(words, jnp.int32)
    return QuantizedWeight(packed, scales.astype(jnp.float32), None, "int4", _shape(values))


def pack_vq(codes: jax.Array, codebook: jax.Array, scales: jax.Array) -> QuantizedWeight:
    """A vector-quantized weight: every 4 rows of a column are an entry of a codebook.

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
    """The arrays that the `pack_…` of the weight's format was given."""
    rows = weight.shape[0]
    if weight.format == "vq":
        assert weight.codebook is not None
        entries = jax.lax.bitcast_convert_type(weight.codebook, jnp.int8)
        codebook = entries.reshape(weight.codebook.shape[0], -1, VQ_LENGTH)
        return weight.data[:, : rows // VQ_LENGTH], codebook, weight.scales[0]
    if weight.format == "int4":
        return unpack_words(weight.data)[:rows], weight.scales
    return weight.data[:rows], weight.scales[0]


def unpack_words(words: jax.Array) -> jax.Array:
    """int32 (K/8, N) words as int8 (K, N) values in -8 … 7."""
    # Up to the top and down again: the right shift of a signed word brings the sign along.
    raised = words[:, None] << (28 - 4 * jnp.arange(INT4_PER_WORD, dtype=jnp.int32))[:, None]
    return (raised >> 28).astype(jnp.int8).reshape(-1, words.shape[1])


def decode_vq(codes: jax.Array, codebook: jax.Array) -> jax.Array:
    """The sum over stages as int32 (K, N), of codes (stages, K/4, N) and a codebook of words."""
    entries = jax.lax.bitcast_convert_type(codebook, jnp.int8).astype(jnp.int32)
    table = entries.reshape(codebook.shape[0], -1, VQ_LENGTH)
    found = jax.vmap(lambda table, codes: table[codes.astype(jnp.int32)])(table, codes).sum(0)
    return found.swapaxes(1, 2).reshape(-1, codes.shape[2])


def dequantize(weight: QuantizedWeight, dtype: DTypeLike = jnp.float32) -> jax.Array:
    """The (K, N) matrix that the weight stands for."""
    values = dequantize_arrays(
        weight.data, weight.scales, weight.codebook, format=weight.format, dtype=dtype
    )
    return values[: weight.shape[0]]


def dequantize_arrays(
    data: jax.Array, scales: jax.Array, codebook: jax.Array | None, *, format: str, dtype: DTypeLike
) -> jax.Array:
    """`dequantize` of a weight's parts, padding included."""
    if format == "vq":
        assert codebook is not None
        values = decode_vq(data, codebook)
    else:
        values = unpack_words(data) if format == "int4" else data
    grouped = values.reshape(scales.shape[0], -1, values.shape[1])
    return decode(grouped, scales[:, None], dtype).reshape(values.shape)


def quantize_weight(
    w: jax.Array, format: WeightFormat, *, group: int = INT4_GROUP
) -> QuantizedWeight:
    """Round a float (K, N) matrix to the nearest values of a format, by its largest magnitudes.

    Args:
        w: The matrix.
        format: "int8" or "fp8" (a scale for each column), or "int4" (one for each group of rows).
        group: Rows that share an int4 scale, a multiple of 128.

    Raises:
        TPUKernelError: The format is unknown, or "vq", whose codebook must be fitted first.
    """
    check_format(format)
    if format == "vq":
        raise TPUKernelError(
            "A vector-quantized weight needs a codebook fitted to the matrix; fit one and call "
            "pack_vq, or take format='int4'."
        )
    wide = w.astype(jnp.float32)
    if format == "int4":
        rows = round_up(w.shape[0], group)
        wide = jnp.pad(wide, ((0, rows - w.shape[0]), (0, 0))).reshape(-1, group, w.shape[1])
    values, scales = quantize(wide, WEIGHT_FORMATS[format].values, axis=-2)
    if format == "fp8":
        return pack_fp8(values, scales[0])
    if format == "int8":
        return pack_int8(values, scales[0])
    values = values.astype(jnp.int8).reshape(-1, w.shape[1])[: w.shape[0]]
    return pack_int4(values, scales[:, 0], group=group)


def _pad_rows(values: jax.Array, multiple: int = LANES) -> jax.Array:
    missing = -values.shape[-2] % multiple
    room = [(0, 0)] * (values.ndim - 2) + [(0, missing), (0, 0)]
    return jnp.pad(values, room) if missing else values


def _shape(values: jax.Array) -> tuple[int, int]:
    return values.shape[0], values.shape[1]


def _expect(array: jax.Array, dtype: DTypeLike, name: str, rank: int) -> None:
    if array.dtype != dtype or array.ndim != rank:
        raise TPUKernelError(
            f"{name} are {array.dtype}{list(array.shape)}; expected {jnp.dtype(dtype).name} with "
            f"{rank} dimensions."
        )


def _expect_shape(array: jax.Array, shape: tuple[int, ...], name: str) -> None:
    if array.shape != shape:
        raise TPUKernelError(f"{name} are {array.shape}; expected {shape}.")

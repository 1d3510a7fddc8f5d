"""compressed-tensors: the integers and floats that llm-compressor writes for vLLM."""

from typing import Any, cast

import numpy as np

from ....errors import TPUModelError
from .float_formats import GROUP, LEVELS, codes_of, powers_of_two, scaled_blocks
from .scheme import (
    FLOATS,
    Activations,
    Json,
    PublishedWeight,
    Scheme,
    Tensors,
    group_size,
    take,
    unpack_bits,
)

_PACKED, _MX = "pack-quantized", "mxfp4-pack-quantized"
_PLAIN = ("int-quantized", "float-quantized", "naive-quantized")
_ACTIVATIONS: dict[tuple[Any, Any], Activations] = {
    ("int", 8): "int8",
    ("float", 8): "float8_e4m3fn",
}


class CompressedTensors:
    """`weight_packed` or `weight` (out, in), with `weight_scale` and optional `weight_zero_point`.

    Packed values are int32 words along the inputs with an offset of 2^(bits-1). Their zero points
    are packed along the outputs. `weight_shape` is the shape of the matrix.
    """

    methods = ("compressed-tensors",)
    marks = (("", "_packed"), ("", "_scale"))

    def scheme(self, config: Json) -> Scheme:
        """See `PublishedFormat`."""
        groups = cast("Json", config.get("config_groups") or {})
        found = [cast("Json", one) for one in groups.values()]
        packings = {str(one.get("format") or config.get("format")) for one in found}
        unknown = packings - {_PACKED, _MX, *_PLAIN}
        if not found or unknown:
            raise TPUModelError(
                f"compressed-tensors of format {' and '.join(sorted(unknown)) or None} are not "
                f"supported; expected {', '.join((_PACKED, *_PLAIN, _MX))}."
            )
        # The first group covers most matrices; decoding looks at the tensors of each matrix.
        weights, inputs = found[0].get("weights"), found[0].get("input_activations")
        if not weights:
            raise TPUModelError("quantization_config has no quantized weights.")
        return _scheme(weights, inputs or {}, sorted(packings)[0])

    def decode(self, name: str, scheme: Scheme, tensors: Tensors) -> PublishedWeight:
        """See `PublishedFormat`."""
        if f"{name}_packed" not in tensors:
            found = scaled_blocks(name, tensors, scheme.block, f"{name}_scale")
            zeros = _zeros(name, tensors, found.scales.shape)
            return PublishedWeight(found.values, found.scales, found.block, zeros)
        packed = take(tensors, f"{name}_packed", "uint8 int32", 2)
        if packed.dtype == np.uint8:
            scales = tensors.read(f"{name}_scale")
            if scales.dtype != np.uint8:
                raise TPUModelError(
                    f"'{name}_scale' is {scales.dtype}; expected uint8 exponents (MXFP4). NVFP4, "
                    "with float8 scales, is not supported."
                )
            levels = LEVELS[codes_of(packed, low_first=True)]
            return PublishedWeight(levels, powers_of_two(scales, name), (1, GROUP))
        return _packed(name, scheme, packed, tensors)


def _scheme(weights: Json, inputs: Json, packing: str) -> Scheme:
    bits, kind = weights.get("num_bits"), weights.get("type", "int")
    if (kind, bits) not in {*(("int", n) for n in range(2, 9)), ("float", 8), ("float", 4)}:
        raise TPUModelError(
            f"weights of type {kind!r} with {bits!r} bits are not supported; expected int with 2 "
            "to 8 bits, or float with 8 or 4."
        )
    strategy = weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")
    sides = cast("Any", weights.get("block_structure") or [128, 128])
    blocks: dict[str, tuple[int | None, int | None]] = {
        "tensor": (None, None),
        "channel": (1, None),
        "group": (1, group_size(weights)),
        "block": (sides[0], sides[1]),
    }
    if strategy not in blocks:
        raise TPUModelError(
            f"scales by '{strategy}' are not supported; expected {', '.join(blocks)}."
        )
    symmetric = bool(weights.get("symmetric", True))
    narrow = "float8_e4m3fn" if bits == 8 else "float4_e2m1fn"
    integers = f"int{bits}" if symmetric else f"uint{bits}"
    return Scheme(
        method="compressed-tensors",
        values=integers if kind == "int" else narrow,
        bits=int(cast("int", bits)),
        block=blocks[strategy],
        scale_bits=8 if packing == _MX else 16,
        zero_bits=0 if symmetric else int(cast("int", bits)),
        activations=_ACTIVATIONS.get((inputs.get("type"), inputs.get("num_bits")), "bfloat16"),
        reordered=weights.get("actorder") in ("group", True),
        packing=packing,
    )


def _packed(name: str, scheme: Scheme, packed: np.ndarray, tensors: Tensors) -> PublishedWeight:
    scales = take(tensors, f"{name}_scale", FLOATS, 2)
    shape = take(tensors, f"{name}_shape", "int32 int64", 1).tolist()
    if len(shape) != 2 or shape[0] != packed.shape[0]:
        raise TPUModelError(
            f"'{name}_packed' is {packed.shape}, which does not match '{name}_shape' {shape}; "
            "download it again."
        )
    rows, columns = shape
    words = packed.shape[1]
    # Where a checkpoint has several schemes, the number of words determines a matrix's bits.
    widths = (scheme.bits, *range(2, 9))
    bits = next((n for n in widths if columns and -(-columns * n // 32) == words), None)
    if bits is None:
        raise TPUModelError(
            f"'{name}_packed' has {words} words for {columns} inputs, which matches no number of "
            "bits from 2 to 8; download it again."
        )
    middle = 1 << (bits - 1)
    values = unpack_bits(packed, bits, columns) - middle
    order = None
    if f"{name}_g_idx" in tensors:
        order = take(tensors, f"{name}_g_idx", "int32 int64", 1).astype(np.int64)
        order = None if (order == -1).all() else order
    zeros = None
    if f"{name}_zero_point" in tensors:
        stored = take(tensors, f"{name}_zero_point", "int32", 2)
        zeros = unpack_bits(stored.T, bits, rows).T - middle
    group = -(-columns // max(1, scales.shape[1]))
    if order is not None and np.array_equal(order, np.arange(columns) // group):
        order = None
    return PublishedWeight(values, scales.astype(np.float32), (1, group), zeros, order)


def _zeros(name: str, tensors: Tensors, shape: tuple[int, ...]) -> np.ndarray | None:
    """Return the zero points, or None where all are 0, as for floats."""
    if f"{name}_zero_point" not in tensors:
        return None
    found = tensors.read(f"{name}_zero_point")
    if not found.astype(np.float32).any():
        return None
    found = take(tensors, f"{name}_zero_point", "int8")
    if found.size != np.prod(shape):
        raise TPUModelError(
            f"'{name}_zero_point' has {found.size} numbers; expected one per scale of {shape}."
        )
    return found.reshape(shape)

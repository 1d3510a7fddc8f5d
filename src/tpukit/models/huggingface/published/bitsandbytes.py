"""bitsandbytes: int8 with a scale per row, and 4-bit codes with a table of 16 values."""

from typing import Any

import numpy as np

from ....errors import TPUModelError
from ....plain_data import parse_json
from .float_formats import codes_of
from .scheme import FLOATS, Json, PublishedWeight, Scheme, Tensors, take

_KINDS = ("nf4", "fp4")
_SIXTEEN = 16
_INT8_LARGEST = 127
_MOST_STATE_BYTES = 1 << 16


class BitsAndBytes:
    """The tensors that bitsandbytes writes through transformers.

    8-bit: `weight` int8 (out, in) and `SCB` (out,), the largest magnitude of each row. 4-bit:
    `weight` uint8, two codes per byte with the higher bits first; `weight.quant_map`, the values of
    the codes; `weight.absmax`, a scale per 64 values that may be quantized to uint8; and the JSON
    `weight.quant_state.bitsandbytes__nf4`.
    """

    methods = ("bitsandbytes",)
    marks = (("", ".absmax"), ("weight", "SCB"))

    def scheme(self, config: Json) -> Scheme:
        """See `PublishedFormat`."""
        if config.get("load_in_8bit"):
            return Scheme(
                method="bitsandbytes",
                values="int8",
                bits=8,
                block=(1, None),
                scale_bits=32,
                activations="int8",
            )
        kind = config.get("bnb_4bit_quant_type", "fp4")
        if kind not in _KINDS:
            raise TPUModelError(f"bnb_4bit_quant_type={kind!r}; expected nf4 or fp4.")
        nested = bool(config.get("bnb_4bit_use_double_quant", False))
        return Scheme(
            method="bitsandbytes",
            values=kind if kind == "nf4" else "fp4-bnb",
            bits=4,
            block=(1, 64),
            scale_bits=8 if nested else 32,
        )

    def decode(self, name: str, scheme: Scheme, tensors: Tensors) -> PublishedWeight:
        """See `PublishedFormat`."""
        values = take(tensors, name, "int8 uint8")
        if f"{name}.absmax" not in tensors:
            rows = take(tensors, f"{name.removesuffix('weight')}SCB", FLOATS)
            if values.dtype != np.int8 or values.ndim != 2:
                raise TPUModelError(
                    f"'{name}' is {values.dtype}{list(values.shape)}; expected int8 (out, in), the "
                    "8-bit layout of bitsandbytes."
                )
            scales = rows.astype(np.float32).reshape(-1, 1) / np.float32(_INT8_LARGEST)
            return PublishedWeight(values, scales, (1, values.shape[1]))
        state = _state(name, tensors)
        rows, columns = state["shape"]
        table = take(tensors, f"{name}.quant_map", FLOATS).astype(np.float32)
        if table.shape != (_SIXTEEN,) or values.size * 2 != rows * columns:
            raise TPUModelError(
                f"'{name}' has {values.size} bytes and a table of {table.shape}, which do not "
                f"match a matrix of {rows}×{columns}; download it again."
            )
        codes = codes_of(values.view(np.uint8).reshape(-1), low_first=False)
        return _by_rows(
            table[codes], _absmax(name, state, tensors), state["blocksize"], (rows, columns)
        )


def _by_rows(
    values: np.ndarray, scales: np.ndarray, block: int, shape: tuple[int, int]
) -> PublishedWeight:
    """Return the weight of blocks over rows; where blocks cross rows, every value has a scale."""
    needed = -(-values.size // block)
    if scales.shape != (needed,):
        raise TPUModelError(
            f"there are {scales.shape} scales for {values.size} values in blocks of {block}; "
            f"expected {needed}."
        )
    if shape[1] % block:
        each = np.repeat(scales, block)[: values.size].reshape(shape)
        return PublishedWeight(values.reshape(shape), each, (1, 1))
    return PublishedWeight(values.reshape(shape), scales.reshape(shape[0], -1), (1, block))


def _absmax(name: str, state: Json, tensors: Tensors) -> np.ndarray:
    stored = take(tensors, f"{name}.absmax", f"uint8 {FLOATS}").reshape(-1)
    if f"{name}.nested_absmax" not in tensors:
        return stored.astype(np.float32)
    table = take(tensors, f"{name}.nested_quant_map", FLOATS).astype(np.float32)
    outer = take(tensors, f"{name}.nested_absmax", FLOATS).astype(np.float32).reshape(-1)
    block, offset = state["nested_blocksize"], np.float32(state["nested_offset"])
    if stored.dtype != np.uint8 or table.shape != (256,) or len(outer) * block < len(stored):
        raise TPUModelError(
            f"the scales of '{name}' are {stored.dtype}[{len(stored)}] with a table of "
            f"{table.shape} and {len(outer)} nested scales, which do not match; download it again."
        )
    return table[stored] * np.repeat(outer, block)[: len(stored)] + offset


def _state(name: str, tensors: Tensors) -> dict[str, Any]:
    for kind in _KINDS:
        key = f"{name}.quant_state.bitsandbytes__{kind}"
        if key in tensors:
            text = take(tensors, key, "uint8").tobytes()
            break
    else:
        raise TPUModelError(f"'{name}' has no quant_state; the weights are incomplete.")
    try:
        state = parse_json(text[:_MOST_STATE_BYTES])
        whole = [*state["shape"], state["blocksize"], state.get("nested_blocksize", 256)]
        good = len(state["shape"]) == 2 and all(isinstance(n, int) and n > 0 for n in whole)
        offset = float(state.get("nested_offset", 0.0))
    except (ValueError, KeyError, TypeError, AttributeError):
        good, state, offset = False, {}, 0.0
    if not good:
        raise TPUModelError(f"the quant_state of '{name}' is damaged; download it again.")
    nested = {"nested_blocksize": state.get("nested_blocksize", 256), "nested_offset": offset}
    return {"shape": tuple(state["shape"]), "blocksize": state["blocksize"], **nested}

"""A `VQArray` as tensors and a description, and back, with every check between."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from ...errors import TPUCheckpointError, TPUValidationError
from ..codebooks.codebook import code_dtype
from ..formats import TRELLIS_BITS, CodeLayout, VQFormat
from ..vector_codes.trellis import padded_width
from ..vector_codes.vq_array import VQArray

_MOST = 2**40


def describe(array: VQArray) -> tuple[dict[str, jax.Array], dict[str, Any]]:
    """The arrays of one by their names in a file, and what they mean."""
    format = array.format
    parts = {"indices": array.codes, "codebook": array.entries, "scale": array.scales}
    if array.signs is not None:
        parts["signs"] = array.signs
    return parts, {
        "shape": list(array.shape),
        "layout": array.layout,
        "length": format.length,
        "entries": format.entries,
        "stages": format.stages,
        "leading": list(array.codes.shape[:-3]),
        "rotated": array.signs is not None,
    }


def array_from(place: Path, name: str, said: Any, tensors: dict[str, np.ndarray]) -> VQArray:
    """Make an array of what a file says; its parts are taken out of `tensors`.

    Raises:
        TPUCheckpointError: Description and tensors do not fit.
    """
    where = Path(f"{place}: {name}")
    if not isinstance(said, dict):
        raise TPUCheckpointError(f"{where} is not described.")
    shape = _sizes(where, said.get("shape"))
    leading = _sizes(where, said.get("leading", []))
    layouts = get_args(CodeLayout)
    layout = next((one for one in layouts if one == said.get("layout")), None)
    if len(shape) != 2 or layout is None or not isinstance(said.get("rotated"), bool):
        raise TPUCheckpointError(
            f"{where} has shape {shape} and layout {said.get('layout')!r}; expected (in, out) and "
            f"one of {', '.join(layouts)}."
        )
    stages, entries, length = sizes_in(where, said, ("stages", "entries", "length"))
    bits = TRELLIS_BITS.get(layout, 0)
    try:
        format = VQFormat(length=length, entries=entries, stages=stages, trellis=bits)
    except TPUValidationError as error:
        raise TPUCheckpointError(f"{where}: {error}") from None
    if format.layout != layout:
        raise TPUCheckpointError(f"{where} has layout {layout}; {format.name} is {format.layout}.")
    width = padded_width(shape[1]) * bits // 8 if bits else shape[1]
    kind = "uint8" if bits else np.dtype(code_dtype(entries)).name
    tall = -(-shape[0] // length)

    def part(key: str, dtype: str, sizes: tuple[int, ...]) -> np.ndarray:
        full = f"{name}.{key}"
        found = expect(place, tensors, full, (dtype,), (*leading, *sizes))
        del tensors[full]
        return found

    codes = part("indices", kind, (stages, tall, width))
    if not bits and codes.size and int(codes.max()) >= entries:
        raise TPUCheckpointError(
            f"{where} has index {int(codes.max())}; its codebook has {entries} entries."
        )
    table = part("codebook", "int8", (stages, entries, length))
    scales = part("scale", "bfloat16", (shape[1],))
    signs = part("signs", "int8", (shape[0],)) if said["rotated"] else None
    if not np.isfinite(scales.astype(np.float32)).all():
        raise TPUCheckpointError(f"{where} has scales that are not finite.")
    if signs is not None and not (np.abs(signs.astype(np.int32)) == 1).all():
        raise TPUCheckpointError(f"{where} has signs that are neither 1 nor -1.")
    return VQArray(
        jnp.asarray(codes),
        jnp.asarray(table),
        jnp.asarray(scales),
        None if signs is None else jnp.asarray(signs),
        (shape[0], shape[1]),
        layout,
    )


def expect(
    place: Path,
    tensors: Mapping[str, np.ndarray],
    name: str,
    dtypes: tuple[str, ...],
    shape: tuple[int, ...],
) -> np.ndarray:
    """A tensor of a file.

    Raises:
        TPUCheckpointError: It is not there, or of another type or shape.
    """
    found = tensors.get(name)
    if found is None:
        raise TPUCheckpointError(f"{place} has no tensor {name!r}.")
    if found.dtype.name not in dtypes or found.shape != shape:
        raise TPUCheckpointError(
            f"{place} has {name} as {found.dtype}{list(found.shape)}; expected "
            f"{' or '.join(dtypes)}{list(shape)}."
        )
    return found


def sizes_in(place: Path, said: Mapping[str, Any], names: tuple[str, ...]) -> list[int]:
    """Sizes that a description gives by name.

    Raises:
        TPUCheckpointError: One is missing, or no whole number within reason.
    """
    found: list[int] = []
    for name in names:
        value = said.get(name)
        if isinstance(value, str) and value.isascii() and value.isdecimal() and len(value) < 16:
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 2**20:
            raise TPUCheckpointError(f"{place} gives {name}={value!r:.40}; expected a size.")
        found.append(value)
    return found


def _sizes(place: Path, said: Any) -> tuple[int, ...]:
    whole = isinstance(said, list) and len(said) <= 4
    if not whole or not all(type(size) is int and 0 < size <= _MOST for size in said):
        raise TPUCheckpointError(f"{place} gives sizes {said!r:.60}; expected whole numbers.")
    if math.prod(said) > _MOST:
        raise TPUCheckpointError(f"{place} claims {math.prod(said):,} values; that is too many.")
    return tuple(said)

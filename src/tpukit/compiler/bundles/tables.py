"""Integer arrays as the words a kernel finds in its scalar memory: tiled and packed."""

import math
from collections.abc import Sequence
from typing import Any

from ...errors import XLACompilationError
from ..hlo import Shape

_WORD_BYTES = 4


def words_of(array: Any, shape: Shape) -> tuple[int, ...]:
    """The 32-bit words of an integer array laid out as the compiler printed its shape.

    A kernel's tables travel to scalar memory as they lie in HBM, so one word may hold several
    elements that are rows apart: `s8[8,4]{1,0:T(8,128)(4,1)}` keeps four rows in each word.

    Raises:
        XLACompilationError: The array has another shape, or elements smaller than a byte.
    """
    import numpy as np

    values: Any = np.asarray(array)
    if tuple(values.shape) != shape.dims:
        raise XLACompilationError(
            f"a kernel's table has shape {tuple(values.shape)} here and {shape.dims} in the "
            "compiled program; trace and compile the same arguments."
        )
    if values.dtype == np.bool_:
        values = values.astype(np.int32 if shape.dtype != "pred" else np.int8)
    if values.dtype.kind not in "iu" or values.dtype.itemsize > _WORD_BYTES:
        raise XLACompilationError(
            f"a kernel's table holds {values.dtype}; only integers of 8 to 32 bits are followed."
        )
    order = shape.layout or tuple(range(values.ndim - 1, -1, -1))
    values = values.transpose(tuple(reversed(order)))
    for tile in shape.tiles:
        values = _tiled(values, tile)
    data = values.tobytes()
    data += bytes(-len(data) % _WORD_BYTES)
    return tuple(np.frombuffer(data, np.int32).tolist())


def _tiled(values: Any, tile: Sequence[int]) -> Any:
    """Cut the last dimensions into tiles, which become the last dimensions in their place."""
    import numpy as np

    missing = len(tile) - values.ndim
    if missing > 0:
        values = values.reshape((1,) * missing + values.shape)
    lead = values.ndim - len(tile)
    padding = [(0, 0)] * lead + [
        (0, -size % edge) for size, edge in zip(values.shape[lead:], tile, strict=True)
    ]
    values = np.pad(values, padding)
    cut: list[int] = list(values.shape[:lead])
    for size, edge in zip(values.shape[lead:], tile, strict=True):
        cut += [size // edge, edge]
    split = range(lead, lead + 2 * len(tile))
    axes = [*range(lead), *split[::2], *split[1::2]]
    assert math.prod(cut) == values.size
    return values.reshape(cut).transpose(axes)

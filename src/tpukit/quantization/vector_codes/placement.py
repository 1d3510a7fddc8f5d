"""Where the arrays of a `VQArray` lie when its matrix is split: codes like the weight."""

from dataclasses import replace
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ...errors import ShardingError
from ..formats import TRELLIS_BITS
from .trellis import run_length
from .vq_array import VQArray


def array_shardings(array: VQArray, sharding: NamedSharding) -> VQArray:
    """A `VQArray` of shardings, for `jax.device_put` and `jax.jit`, from that of its matrix.

    Args:
        array: Of arrays or of their shapes.
        sharding: Of the (in, out) matrix; a stack's has its leading axes first.

    Raises:
        ShardingError: A cut would go through a vector or through a run of a trellis.
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
    """Put an array's parts where the sharding of its matrix says.

    Raises:
        ShardingError: A cut would go through a vector or through a run of a trellis.
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

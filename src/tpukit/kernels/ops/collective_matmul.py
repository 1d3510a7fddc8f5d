"""A matmul over a mesh axis that overlaps the gather of its rows with the multiplication.

Every device has a shard of a's rows and a shard of b's columns. Instead of an all-gather of a and
one matmul, each step multiplies the rows at hand while they are sent to the neighbour: half of them
one way around the ring, half the other, so that both directions of every link are used.
"""

import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ...errors import MeshError, ShardingError, did_you_mean
from ...hardware.target import current_target
from ..partition.sharded_call import sharded_call

OWN_AXIS = "model"  # of a mesh that is made where none is given
Multiply = Callable[[jax.Array, jax.Array], jax.Array]


def collective_matmul(
    a: jax.Array,
    b: jax.Array,
    *,
    mesh: Mesh | AbstractMesh | None,
    axis: str | None,
    multiply: Multiply,
) -> jax.Array:
    """Return `a @ b` with a's rows and b's columns sharded over `axis`, like the result's columns.

    Args:
        a: (M, K).
        b: (K, N).
        mesh: None takes the current mesh (`jax.set_mesh`), that of an operand, or as many devices
            of this process as rows and columns can be sharded over.
        axis: Mesh axis; None takes the largest.
        multiply: The matmul of the shards on one device.

    Raises:
        MeshError: The mesh has no such axis.
        ShardingError: Rows or columns do not divide by the axis.
    """
    in_use = _mesh_in_use(a, b) if mesh is None else mesh
    names = tuple(str(name) for name in in_use.axis_names)
    axis = axis or max(names, key=lambda name: in_use.shape[name])
    if axis not in names:
        raise MeshError(
            f"The mesh has no axis {axis!r}; it has {', '.join(names)}." + did_you_mean(axis, names)
        )
    ways = in_use.shape[axis]
    for what, size in (("rows of a", a.shape[0]), ("columns of b", b.shape[1])):
        if size % ways:
            raise ShardingError(
                f"{size} {what} cannot be split over '{axis}'={ways}; pad them to "
                f"{-(-size // ways) * ways}, or use tpu_strategy='auto'."
            )
    mapped = sharded_call(
        partial(_ring, axis=axis, ways=ways, multiply=multiply),
        in_use,
        in_specs=(P(axis), P(None, axis)),
        out_specs=P(None, axis),
        axes={axis},
        checks_varying=True,
    )
    return jax.jit(mapped)(a, b)  # else every operation would be its own program


def _mesh_in_use(a: jax.Array, b: jax.Array) -> Mesh | AbstractMesh:
    """Return the current mesh or that of an operand, else one of the local devices."""
    around = jax.sharding.get_abstract_mesh()
    if not around.empty:
        return around
    for operand in (a, b):
        lies = getattr(operand, "sharding", None)  # a traced array may have none
        if isinstance(lies, NamedSharding):
            return lies.mesh
    # A program traced for chips that are not here has only its own devices.
    here = jax.devices() if current_target() is None else jax.devices()[:1]
    ways = math.gcd(a.shape[0], b.shape[1])
    count = max(size for size in range(1, len(here) + 1) if ways % size == 0)
    return Mesh(np.array(here[:count]), (OWN_AXIS,))


def _ring(a: jax.Array, b: jax.Array, *, axis: str, ways: int, multiply: Multiply) -> jax.Array:
    here = jax.lax.axis_index(axis)
    rows = a.shape[0]
    # With two devices both directions lead to the same neighbour, and one row cannot be halved.
    half = rows // 2 if ways > 2 and rows > 1 else rows
    streams = [(a[:half], 0, 1), (a[half:], half, -1)] if half < rows else [(a, 0, 1)]
    out: jax.Array | None = None
    for step in range(ways):
        travelling: list[tuple[jax.Array, int, int]] = []
        for part, offset, way in streams:
            if step < ways - 1:
                ring = [(device, (device + way) % ways) for device in range(ways)]
                travelling.append((jax.lax.ppermute(part, axis, ring), offset, way))
            product = multiply(part, b)
            if out is None:
                out = jnp.zeros_like(product, shape=(ways * rows, b.shape[1]))
            source = (here - way * step) % ways
            out = jax.lax.dynamic_update_slice_in_dim(out, product, source * rows + offset, axis=0)
        streams = travelling
    assert out is not None
    return out

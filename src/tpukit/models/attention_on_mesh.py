"""Attention kernels on a mesh: each device runs one on its own examples and heads."""

import math
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ..parallel.mesh import AnyMesh, axis_sizes


class LocalAttention(Protocol):
    """A kernel that knows nothing of meshes."""

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, segment_ids: jax.Array | None
    ) -> jax.Array:
        """Causal attention of q (B, S, H, D) over k, v (B, S, KV, D)."""
        ...


def attend_on_mesh(
    attend: LocalAttention,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    segment_ids: jax.Array | None,
    *,
    mesh: AnyMesh | None,
    batch_axes: tuple[str, ...],
    head_axes: tuple[str, ...],
) -> jax.Array:
    """Run `attend` on each device's part.

    Args:
        attend: The kernel.
        q: Queries.
        k: Keys; H must be a multiple of KV.
        v: Values.
        segment_ids: (B, S) numbers that keep packed documents apart.
        mesh: The mesh the arrays are spread over; None for one device.
        batch_axes: Mesh axes that split the batch.
        head_axes: Mesh axes that split the heads.
    """
    if mesh is not None:
        sizes = axis_sizes(mesh)
        if k.shape[2] % math.prod(sizes[axis] for axis in head_axes):
            # Fewer key heads than shares: each share needs whole ones of its own.
            k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    if mesh is None or not (batch_axes or head_axes):
        return attend(q, k, v, segment_ids)
    spread = PartitionSpec(batch_axes or None, None, head_axes or None, None)
    rows = PartitionSpec(batch_axes or None, None)
    arguments = (q, k, v) if segment_ids is None else (q, k, v, segment_ids)
    specs = (spread,) * 3 if segment_ids is None else (spread,) * 3 + (rows,)

    def local(q: jax.Array, k: jax.Array, v: jax.Array, *ids: jax.Array) -> jax.Array:
        return attend(q, k, v, ids[0] if ids else None)

    call: Any = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=spread, check_vma=False)
    return call(*arguments)

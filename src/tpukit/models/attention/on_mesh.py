"""Attention kernels on a mesh: each device runs one on its own examples and heads."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax.sharding import PartitionSpec

from ...annotations import AnyMesh
from ...parallel.mesh.manual_axes import axes_to_take, whole_key_heads


class LocalAttention(Protocol):
    """A kernel that knows nothing of meshes."""

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        segment_ids: jax.Array | None,
        *,
        window: int | None,
        interpret: bool,
    ) -> jax.Array:
        """Causal attention of q (B, S, H, D) over k, v (B, S, KV, D)."""
        ...


@dataclass(frozen=True)
class KernelAttention:
    """A kernel as an `AttentionFunction` that can be told how its arrays are spread.

    Attributes:
        attend: The kernel.
        refuse: Raises TPUModelError for queries that the kernel is not made for.
    """

    attend: LocalAttention
    refuse: Callable[[jax.Array], None]

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        window: int | None = None,
        segment_ids: jax.Array | None = None,
        mesh: AnyMesh | None = None,
        batch_axes: tuple[str, ...] = (),
        head_axes: tuple[str, ...] = (),
        interpret: bool = False,
    ) -> jax.Array:
        """Causal attention of q (B, S, H, D) over k, v (B, S, KV, D).

        Args:
            q: Queries.
            k: Keys; H must be a multiple of KV.
            v: Values.
            window: How many keys back a query sees, itself included.
            segment_ids: (B, S) numbers that keep packed documents apart.
            mesh: The mesh the arrays are spread over; None for one device.
            batch_axes: Mesh axes that split the batch.
            head_axes: Mesh axes that split the heads.
            interpret: Run the kernel's meaning without a TPU, slowly.

        Raises:
            TPUModelError: The kernel is not made for such queries.
        """
        self.refuse(q)
        if mesh is not None:
            k, v = whole_key_heads(q, k, v, mesh=mesh, axes=head_axes)

        def local(q: jax.Array, k: jax.Array, v: jax.Array, *ids: jax.Array) -> jax.Array:
            return self.attend(q, k, v, ids[0] if ids else None, window=window, interpret=interpret)

        arguments = (q, k, v) if segment_ids is None else (q, k, v, segment_ids)
        if mesh is None or not (batch_axes or head_axes):
            return local(*arguments)
        spread = PartitionSpec(batch_axes or None, None, head_axes or None, None)
        rows = PartitionSpec(batch_axes or None, None)
        specs = (spread,) * 3 if segment_ids is None else (spread,) * 3 + (rows,)
        # Inside a pipeline stage the stage axis is taken already: the kernel takes the others.
        around, free = axes_to_take(mesh)
        call: Any = jax.shard_map(
            local, mesh=around, in_specs=specs, out_specs=spread, axis_names=free, check_vma=False
        )
        return call(*arguments)

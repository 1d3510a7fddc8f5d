"""Where a model is measured: batches, and its weights with them, over the devices of a mesh."""

import math
from dataclasses import dataclass
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ...annotations import PyTree
from ...errors import MeshError, TPUValidationError
from ...parallel.mesh.axes import BATCH_ROLES, axes_with_role, role_of
from ...parallel.rebalancing.reshard import reshard
from ...parallel.sharding.layout import Layout, make_layout
from ...parallel.sharding.strategy import strategy_for
from ..adapters import ModelAdapter, head_counts_of
from .parameter import is_stored

_ROLES = ("replica", "data", "fsdp", "tensor")


@dataclass(frozen=True, eq=False)
class Spread:
    """Puts parameters and batches on a mesh, where the compiler adds up what devices see.

    Attributes:
        mesh: The devices. Rows of a batch are split along `data` and `fsdp`, weights along `fsdp`
            and `tensor`.
        layout: Of the parameters as arrays.
    """

    mesh: Mesh
    layout: Layout

    @classmethod
    def of(cls, mesh: Mesh, adapter: ModelAdapter, params: PyTree, example: PyTree) -> "Spread":
        """The placement of a model and of batches like `example`.

        Raises:
            MeshError: An axis splits neither rows nor weights.
            TPUValidationError: The devices cannot share the rows of the example.
            ShardingError: The weights cannot be split so.
        """
        if strange := [name for name in mesh.axis_names if role_of(name) not in _ROLES]:
            raise MeshError(
                f"axis '{strange[0]}' of the mesh splits neither rows of data nor weights here; "
                f"use axes called data, fsdp or tensor."
            )
        # `jax.make_mesh` makes axes whose shardings are part of types: a model's own products
        # would then have to say theirs. Here the compiler decides, as on every mesh of tpukit's.
        mesh = Mesh(mesh.devices, mesh.axis_names)
        layout = make_layout(
            params, mesh, strategy_for(mesh.axis_names), head_counts=head_counts_of(adapter)
        )
        made = cls(mesh, layout)
        rows = [leaf.shape[0] for leaf in jax.tree.leaves(example) if leaf.ndim]
        if not any(made._is_shared(count) for count in rows):
            raise TPUValidationError(
                f"batches have {max(rows, default=0)} rows, which {made.ways} devices "
                f"({' × '.join(made.axes)}) cannot share; use a multiple of {made.ways} rows, or a "
                "smaller mesh."
            )
        return made

    @property
    def axes(self) -> tuple[str, ...]:
        """Axes of the mesh that split the rows of a batch."""
        return axes_with_role(self.mesh.axis_names, *BATCH_ROLES)

    @property
    def ways(self) -> int:
        """Devices that share the rows of a batch."""
        return math.prod(self.mesh.shape[axis] for axis in self.axes)

    def params(self, params: PyTree) -> PyTree:
        """Parameters on the mesh; quantized ones, which are small, whole on every device."""
        leaves = jax.tree.leaves(params, is_leaf=is_stored)
        if any(is_stored(leaf) for leaf in leaves):
            return jax.device_put(params, NamedSharding(self.mesh, PartitionSpec()))
        return reshard(params, self.layout)

    def batch(self, batch: PyTree) -> PyTree:
        """A batch on the mesh; a last one of fewer rows may lie whole on every device."""

        def one(leaf: Any) -> Any:
            shared = leaf.ndim and self._is_shared(leaf.shape[0])
            spec = PartitionSpec(self.axes) if shared else PartitionSpec()
            return jax.device_put(leaf, NamedSharding(self.mesh, spec))

        return jax.tree.map(one, batch)

    def _is_shared(self, rows: int) -> bool:
        return rows % self.ways == 0

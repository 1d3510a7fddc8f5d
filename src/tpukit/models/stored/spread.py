"""Where a model is measured: batches, and its weights with them, over the devices of a mesh."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ...annotations import PyTree
from ...errors import MeshError, TPUValidationError
from ...parallel.mesh.axes import BATCH_ROLES, axes_with_role, role_of
from ...parallel.rebalancing.reshard import reshard
from ...parallel.sharding.layout import Layout, make_layout
from ...parallel.sharding.strategy import strategy_for
from ..adapters import ModelAdapter, head_counts_of
from .parameter import is_stored
from .placement import stored_shardings

_ROLES = ("replica", "data", "fsdp", "tensor")


def on_host(array: jax.Array) -> np.ndarray:
    """All of an array, whatever devices and processes hold it."""
    if not array.is_fully_addressable:
        assert isinstance(array.sharding, NamedSharding)
        whole = NamedSharding(array.sharding.mesh, PartitionSpec())
        array = jax.jit(lambda one: one, out_shardings=whole)(array)
    return np.asarray(array)


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
        """Parameters on the mesh, each device with its part of them.

        Quantized ones are split like their matrices, and lie whole on every device where a cut
        would go through what one code holds.
        """
        if not any(map(is_stored, jax.tree.leaves(params, is_leaf=is_stored))):
            return reshard(params, self.layout)
        places = stored_shardings(params, self.layout.shardings, or_whole=True)
        return jax.device_put(params, places)

    def gram(self, gram: jax.Array) -> jax.Array:
        """XᵀX (…, inputs, inputs) in a program, its rows split over all devices."""
        if gram.shape[-2] % self.mesh.size:
            return gram
        spec = PartitionSpec(*(None,) * (gram.ndim - 2), self.mesh.axis_names)
        return jax.lax.with_sharding_constraint(gram, NamedSharding(self.mesh, spec))

    def batch(self, batch: PyTree) -> PyTree:
        """A batch on the mesh; a last one of fewer rows may lie whole on every device."""

        def one(leaf: Any) -> Any:
            shared = leaf.ndim and self._is_shared(leaf.shape[0])
            spec = PartitionSpec(self.axes) if shared else PartitionSpec()
            return jax.device_put(leaf, NamedSharding(self.mesh, spec))

        return jax.tree.map(one, batch)

    def _is_shared(self, rows: int) -> bool:
        return rows % self.ways == 0

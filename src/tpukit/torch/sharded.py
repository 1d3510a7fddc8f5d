"""A module's programs on a mesh: parameters split by a strategy, the batch over its devices."""

from contextlib import AbstractContextManager
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ..errors import TPUValidationError
from ..models.adapters.torch_module.arrays import shape_of
from ..models.adapters.torch_module.placement import count_heads
from ..models.adapters.torch_module.state import ModuleState
from ..parallel.mesh.axes import count_batch_ways
from ..parallel.mesh.mesh import axis_sizes
from ..parallel.sharding.layout import Layout, make_layout
from ..parallel.sharding.strategy import strategy_for
from .border import Arrays
from .prepared import link_of, prepare


def shard_module(module: Any, mesh: Mesh, strategy: str | None = None) -> Any:
    """Make a module's calls run on a mesh, and return the same module.

    Parameters stay torch's own on the host. In a program each device holds its share of them and
    of the batch, and the gradients that come back are whole.

    Args:
        module: Prepared or not.
        mesh: Of devices of this process.
        strategy: "data", "fsdp", "fsdp+megatron", …; by the names of the axes by default.

    Raises:
        TPUValidationError: The mesh has devices of other processes.
        ShardingError: The strategy is not one for this mesh.
    """
    here = jax.process_index()
    if any(device.process_index != here for device in mesh.devices.flat):
        raise TPUValidationError(
            "the mesh has devices of other processes, and a loop over torch tensors can split work "
            "over this process's own only: make it from device_manager.local_devices (gradients "
            "are averaged between processes), or train with TPUTrainer, which takes them all."
        )
    trained = ModuleState.of(module).trained
    shapes = {path: shape_of(tensor) for path, tensor in trained.items()}
    layout = make_layout(
        shapes, mesh, strategy or strategy_for(mesh.axis_names), head_counts=count_heads(module)
    )
    link = link_of(prepare(module))
    assert link is not None, "a prepared module has a link"
    link.placement = MeshPlacement(mesh, layout)
    link.programs.clear()
    return module


class MeshPlacement:
    """Parameters where a layout puts them, inputs split over the devices that share a batch."""

    def __init__(self, mesh: Mesh, layout: Layout) -> None:
        self.layout = layout
        self._mesh = mesh
        self._ways = count_batch_ways(axis_sizes(mesh))

    def rules(self) -> AbstractContextManager[Any]:
        """Place activations by the layout's strategy."""
        return self.layout.activation_rules()

    def arguments(self, arrays: Arrays) -> tuple[Any, ...]:
        """Return a program's arguments, in its order, on their shards."""
        everywhere = NamedSharding(self._mesh, PartitionSpec())
        return (
            jax.device_put(arrays.params, self.layout.shardings),
            jax.device_put(arrays.carried, everywhere),
            self.by_batch(arrays.moving),
            self.by_batch(arrays.fixed),
            jax.device_put(arrays.key, everywhere),
        )

    def by_batch(self, arrays: list[jax.Array]) -> list[jax.Array]:
        """Split arrays by their first dimension, where the devices share it evenly."""
        axes = self.layout.batch_spec[:1]

        def place(array: jax.Array) -> jax.Array:
            even = array.ndim > 0 and array.shape[0] % self._ways == 0
            spec = PartitionSpec(*axes) if even else PartitionSpec()
            return jax.device_put(array, NamedSharding(self._mesh, spec))

        return [place(array) for array in arrays]

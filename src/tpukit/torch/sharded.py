"""A module's programs on a mesh: parameters split by a strategy, the batch over its devices."""

from collections.abc import Callable
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
from ..step.placement import strategy_for
from .border import Program
from .lru import LRUCache
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
    link.programs = PlacedPrograms(mesh, layout)
    return module


class PlacedPrograms(LRUCache[Any, Program]):
    """The programs of one module, each placed on a mesh as it is kept."""

    def __init__(self, mesh: Mesh, layout: Layout) -> None:
        super().__init__()
        self.layout = layout
        self._mesh = mesh
        self._ways = count_batch_ways(axis_sizes(mesh))

    def put(self, key: Any, value: Program) -> None:
        """Keep a program, with its arguments moved to their shards before each call."""
        value.forward = self._placed(value.forward)
        value.forward_with_gradient = self._placed(value.forward_with_gradient)
        backward = value.backward
        value.backward = lambda pull_back, cotangents: backward(
            pull_back, self._by_batch(cotangents)
        )
        super().put(key, value)

    def _placed(self, run: Callable[..., Any]) -> Any:
        everywhere = NamedSharding(self._mesh, PartitionSpec())

        def on_mesh(params: Any, carried: Any, moving: Any, fixed: Any, key: jax.Array) -> Any:
            with self.layout.activation_rules():
                return run(
                    jax.device_put(params, self.layout.shardings),
                    jax.device_put(carried, everywhere),
                    self._by_batch(moving),
                    self._by_batch(fixed),
                    jax.device_put(key, everywhere),
                )

        return on_mesh

    def _by_batch(self, arrays: list[jax.Array]) -> list[jax.Array]:
        """Split arrays by their first dimension, where the devices share it evenly."""
        axes = self.layout.batch_spec[:1]

        def place(array: jax.Array) -> jax.Array:
            even = array.ndim > 0 and array.shape[0] % self._ways == 0
            spec = PartitionSpec(*axes) if even else PartitionSpec()
            return jax.device_put(array, NamedSharding(self._mesh, spec))

        return [place(array) for array in arrays]

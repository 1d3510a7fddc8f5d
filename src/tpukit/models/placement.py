"""What parts of a model that the partitioner cannot split are told about a mesh."""

from typing import Any

from jax.sharding import PartitionSpec

from ..annotations import AnyMesh
from ..parallel.sharding.activations import ActivationRules
from ..parallel.sharding.strategy import find_axis
from .execution import Execution


def kernel_spread(mesh: AnyMesh, strategy: str) -> dict[str, Any]:
    """How attention's arrays lie: a kernel sees one device's examples and heads."""
    axes = dict(ActivationRules.of(mesh, strategy).axes)
    return {"mesh": mesh, "batch_axes": axes["batch"], "head_axes": axes.get("heads", ())}


def experts_on(
    mesh: AnyMesh, strategy: str, execution: Execution, *, context: str | None = None
) -> Execution:
    """The execution with experts put on the mesh.

    Left to the partitioner, sorting tokens by expert would sort those of all devices.

    Args:
        mesh: Where it runs.
        strategy: How the work is split.
        execution: The choices made before.
        context: The axis that splits sequences, or None.
    """
    batch = dict(ActivationRules.of(mesh, strategy).axes)["batch"]
    return execution.replace(
        expert_mesh=mesh,
        expert_axis=find_axis(mesh, strategy, "expert"),
        expert_tokens=PartitionSpec(batch or None, context),
    )

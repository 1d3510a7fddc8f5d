"""Settings of how a model runs: attention, remat, scan, and the placement of experts."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import PartitionSpec

from ..annotations import AnyMesh
from ..parallel.sharding.activations import ActivationRules
from ..parallel.sharding.strategy import find_axis
from .attention.choice import AttentionFunction
from .loss import LossChunks
from .remat.policy import NO_REMAT, RematPolicy

if TYPE_CHECKING:
    from .generation.cache_attention import SlotKernel


@dataclass(frozen=True, kw_only=True)
class Execution:
    """Settings that change speed and memory but not the result, except `z_loss`.

    Attributes:
        attention: The attention function or its name.
        remat: What the backward pass recomputes.
        scan_layers: Whether repeated layers are a scan.
        gpu_kernels: Whether norms, rope and gating use our GPU kernels, on one device only.
        joined_matmuls: Whether matrices that read the same activations are multiplied in one
            matmul. It is free where the weights are stored side by side and a copy elsewhere.
        loss_chunks: Chunks of tokens for a loss computed from activations; None computes the loss
            from all logits.
        z_loss: Weight of the squared log of the softmax's normaliser in the loss.
        frozen_head: Whether the unembedding is not trained, so chunked losses skip its gradient.
        zigzag: Devices of the context axis for whose ring order tokens are reordered.
        expert_mesh: The mesh of the experts; without one every expert is where its tokens are.
        expert_axis: The axis of `expert_mesh` that experts are sharded over, or None.
        expert_tokens: The sharding of tokens on `expert_mesh`.
        delta: The gated delta rule for sharded sequences.
        convolution: The short convolution for sharded sequences.
        slots: The kernel for one new token over a cache; None uses XLA.
    """

    attention: str | AttentionFunction = "auto"
    remat: RematPolicy = NO_REMAT
    scan_layers: bool = True
    gpu_kernels: bool = False
    joined_matmuls: bool = False
    loss_chunks: LossChunks = None
    z_loss: float = 0.0
    frozen_head: bool = False
    zigzag: int = 1
    expert_mesh: AnyMesh | None = None
    expert_axis: str | None = None
    expert_tokens: PartitionSpec | None = None
    delta: Callable[..., tuple[jax.Array, jax.Array]] | None = None
    convolution: Callable[..., jax.Array] | None = None
    slots: "SlotKernel | None" = None

    def replace(self, **changes: Any) -> "Execution":
        """Return the same settings with some changed."""
        return dataclasses.replace(self, **changes)


def kernel_spread(mesh: AnyMesh, strategy: str) -> dict[str, Any]:
    """Return the mesh axes of attention's arrays for kernels that run on each device's shard."""
    axes = dict(ActivationRules.of(mesh, strategy).axes)
    return {"mesh": mesh, "batch_axes": axes["batch"], "head_axes": axes.get("heads", ())}


def experts_on(
    mesh: AnyMesh, strategy: str, execution: Execution, *, context: str | None = None
) -> Execution:
    """Return the execution with experts placed on the mesh.

    Without it, the partitioner would sort the tokens of all devices together by expert.

    Args:
        mesh: The mesh of the step.
        strategy: The sharding strategy.
        execution: The settings without experts.
        context: The axis that shards sequences, or None.
    """
    batch = dict(ActivationRules.of(mesh, strategy).axes)["batch"]
    return execution.replace(
        expert_mesh=mesh,
        expert_axis=find_axis(mesh, strategy, "expert"),
        expert_tokens=PartitionSpec(batch or None, context),
    )

"""How a model is run, as opposed to what it is: attention, remat, scan, the experts' mesh."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import PartitionSpec

from ..annotations import AnyMesh
from .attention.choice import AttentionFunction
from .loss.chunked import LossChunks
from .remat.policy import NO_REMAT, RematPolicy

if TYPE_CHECKING:
    from .generation.slot_kernel import SlotKernel


@dataclass(frozen=True, kw_only=True)
class Execution:
    """Choices that change speed and memory, never the result; `z_loss` alone adds to the loss.

    `loss_chunks` is how the loss is cut where a model computes it from activations; None gives
    the loss whole logits. `gpu_kernels` has kernels of our own for norms, rope and gating,
    which see one device only. `one_product` multiplies activations with all matrices that read
    them at once, side by side: free where their weights lie so, a copy elsewhere.
    `z_loss` is what either then weighs log² of the normaliser with. `frozen_head` says that nobody
    asks for the unembedding's gradient, which cut losses make as they go.
    `zigzag` is the number of devices in whose ring order a step puts its tokens.
    `expert_mesh` is the mesh whose `expert_axis` the experts are spread over (None: over no axis)
    and over which tokens are split as `expert_tokens` says; without a mesh every expert is where
    its tokens are. `delta` and `convolution` are linear attention's where a sequence is split.
    `slots` is generation's kernel for one token over a cache; None leaves it to XLA.
    """

    attention: str | AttentionFunction = "auto"
    remat: RematPolicy = NO_REMAT
    scan_layers: bool = True
    gpu_kernels: bool = False
    one_product: bool = False
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
        """The same choices with some changed."""
        return dataclasses.replace(self, **changes)

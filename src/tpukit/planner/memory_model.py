"""Memory of a training step on one device by arithmetic, for one candidate or for arrays of them.

Every argument that differs between candidates may be a numpy array; they broadcast. Weights,
gradients and optimizer state are exact divisions. Activations follow from what each remat policy
keeps of a layer. Temporaries are one layer at work in the backward pass; their factors are fitted
to the compiler's own reports (`benchmarks/memory_estimate.py` prints the error).
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from .model_shape import ModelShape

FLOAT32, BFLOAT16 = 4, 2
LOGITS_BYTES = 512 * 2**20  # what a chunk of the loss holds at most
MIN_CHUNK_TOKENS = 2048
# Copies of a layer's activations that are alive while its gradient is computed.
WORKING_SETS = 1.0
# Layers whose gathered weights are on the device at once: the one at work and the next.
GATHERED_LAYERS = 2.0
# Gradients of a layer before they are scattered, as a share of its gathered weights.
UNSCATTERED_GRADIENTS = 1.0

Numbers = Any  # a number or an array of them


@dataclass(frozen=True, kw_only=True)
class MeshRoles:
    """Devices along each role of a mesh; 1 where the role is not used."""

    data: Numbers = 1
    fsdp: Numbers = 1
    tensor: Numbers = 1
    expert: Numbers = 1
    context: Numbers = 1
    stage: Numbers = 1

    @property
    def devices(self) -> Numbers:
        """All devices of the mesh."""
        return self.data * self.fsdp * self.tensor * self.expert * self.context * self.stage

    @property
    def batch_ways(self) -> Numbers:
        """Devices that share the examples of a batch."""
        return self.data * self.fsdp * self.expert


@dataclass(frozen=True, kw_only=True)
class MemorySplit:
    """Bytes on one device by purpose (origin: model)."""

    weights: Numbers
    gradients: Numbers
    optimizer: Numbers
    activations: Numbers
    temporaries: Numbers
    host: Numbers

    @property
    def total(self) -> Numbers:
        """HBM of one device; what is offloaded to the host is not in it."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.temporaries

    def to_dict(self) -> dict[str, Any]:
        """Bytes by purpose and in total."""
        names = ("weights", "gradients", "optimizer", "activations", "temporaries", "host")
        return {**{name: getattr(self, name) for name in names}, "total": self.total}


def estimate_memory_bytes(
    shape: ModelShape,
    mesh: MeshRoles,
    *,
    per_device_batch: Numbers,
    sequence_length: Numbers,
    remat: str = "full",
    remat_every: int = 1,
    moment_bytes: Numbers = 2 * FLOAT32,
    param_bytes: Numbers = FLOAT32,
    compute_bytes: Numbers = BFLOAT16,
    microbatches: Numbers = 1,
) -> MemorySplit:
    """The memory of one device.

    Args:
        shape: The model.
        mesh: Devices by role.
        per_device_batch: Examples a device and step, over all micro-batches.
        sequence_length: Tokens in an example.
        remat: "none", "minimal", "full", or "offload" (layer inputs on the host).
        remat_every: Layers of a segment: only the input of every so many is kept.
        moment_bytes: Bytes of optimizer state for one parameter.
        param_bytes: Bytes of one master parameter; gradients have the same.
        compute_bytes: Bytes of one activation.
        microbatches: Pieces a step is cut into.
    """
    split = mesh.fsdp * mesh.tensor * mesh.stage
    own = shape.other_parameters / split + shape.expert_parameters / (split * mesh.expert)
    tokens = per_device_batch * sequence_length / mesh.context / microbatches
    layers = shape.layers / mesh.stage / remat_every
    kept, offloaded = _kept_bytes(shape, mesh, tokens, remat, compute_bytes)
    # A pipeline holds the inputs of the micro-batches that are on their way.
    in_flight = np.where(np.asarray(mesh.stage) > 1, 2 * np.asarray(mesh.stage) - 1, 1)
    return MemorySplit(
        weights=own * param_bytes,
        gradients=own * param_bytes,
        optimizer=own * moment_bytes,
        activations=kept * layers * in_flight,
        temporaries=_temporaries(
            shape, mesh, tokens, remat, remat_every, compute_bytes, param_bytes
        ),
        host=offloaded * layers * in_flight,
    )


def _kept_bytes(
    shape: ModelShape, mesh: MeshRoles, tokens: Numbers, remat: str, compute_bytes: Numbers
) -> tuple[Numbers, Numbers]:
    """Bytes of one layer's activations kept on the device, and on the host."""
    layer_input = tokens * shape.d_model * compute_bytes
    if remat == "full":
        return layer_input, 0.0 * layer_input
    if remat == "offload":
        return 0.0 * layer_input, layer_input
    products = (
        shape.attention_width + (shape.hidden_matrices - 1) * shape.hidden_width
    ) / mesh.tensor + 2 * shape.d_model
    if remat == "minimal":
        return layer_input + tokens * products * compute_bytes, 0.0 * layer_input
    between = (2 * shape.hidden_width + shape.heads * shape.head_dim) / mesh.tensor
    everything = products + between + 4 * shape.d_model
    return layer_input + tokens * everything * compute_bytes, 0.0 * layer_input


def _temporaries(
    shape: ModelShape,
    mesh: MeshRoles,
    tokens: Numbers,
    remat: str,
    remat_every: int,
    compute_bytes: Numbers,
    param_bytes: Numbers,
) -> Numbers:
    """One segment at work in the backward pass, or the loss: whichever is larger."""
    everything, _ = _kept_bytes(shape, mesh, tokens, "none", compute_bytes)
    working = 0.0 * everything if remat == "none" else WORKING_SETS * everything * remat_every
    layer_weights = shape.layer_parameters / (mesh.tensor * mesh.expert) * compute_bytes
    gathered = np.where(np.asarray(mesh.fsdp) > 1, GATHERED_LAYERS, 1.0) * layer_weights
    scattered = np.where(np.asarray(mesh.fsdp) > 1, UNSCATTERED_GRADIENTS, 0.0) * layer_weights
    logits = tokens * shape.vocab / mesh.tensor * compute_bytes
    at_once = np.minimum(
        logits,
        np.maximum(LOGITS_BYTES, MIN_CHUNK_TOKENS * shape.vocab / mesh.tensor * compute_bytes),
    )
    head = shape.vocab * shape.d_model / mesh.tensor
    loss = 3 * at_once + head * (compute_bytes + param_bytes)
    return np.maximum(working + gathered + scattered, loss)

"""Memory of a training step on one device by arithmetic, for one candidate or for arrays of them.

Arguments that differ between candidates may be numpy arrays, which broadcast. The peak is the
largest of three moments: in the loss, when all kept activations and the head's whole gradient are
alive; in the backward pass of a layer, when the gradients of all layers are allocated and one
layer's temporaries are alive; or at its end, when only the whole gradient of per-layer embeddings
is left. The compiler's reports show the same moments. Constants in `hardware.rates.MemoryRates` are
read off those reports (`benchmarks/memory.py estimate` lists them and prints the error).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from ...compiler.memory import MemoryReport
from ...hardware import formats
from ...hardware.rates import ChipRates, MemoryRates
from ...models.remat.policy import FULL
from ...plain_data import JsonObject
from ...step.host_memory import HELD_WHILE_READ, READ_AT_ONCE_BYTES, read_limit_bytes
from ...step.optimizer_spec import OptimizerSpec, state_bytes_per_parameter
from .kept import ATTENTION, SPLIT_BY_TENSOR, kept_by, kept_channels
from .model_shape import LANES, LayerShape, ModelShape, in_tiles

FLOAT32, BFLOAT16 = formats.FLOAT32.itemsize, formats.BFLOAT16.itemsize  # bytes of a value
ADAMW_BYTES = state_bytes_per_parameter(OptimizerSpec())
# The loss is chunked by kernels/ops/cross_entropy/chunked.py, which imports jax.
LOGITS_BYTES = 512 * 2**20
MIN_CHUNK_TOKENS = 2048

Numbers = Any  # a number or an array of them


@dataclass(frozen=True, kw_only=True)
class MeshRoles:
    """Devices along each role of a mesh; 1 if a role is not used."""

    data: Numbers = 1
    fsdp: Numbers = 1
    tensor: Numbers = 1
    expert: Numbers = 1
    context: Numbers = 1
    stage: Numbers = 1

    @property
    def devices(self) -> Numbers:
        """Devices of the mesh."""
        return self.data * self.fsdp * self.tensor * self.expert * self.context * self.stage

    @property
    def batch_ways(self) -> Numbers:
        """Devices that a batch is split over."""
        return self.data * self.fsdp * self.expert


@dataclass(frozen=True, kw_only=True)
class MemorySplit:
    """Bytes on one device by purpose, at the peak (origin: model).

    Attributes:
        gradients: Gradients alive at the peak: the head's in the loss, or the layers'.
        temporaries: Copies of weights, logits, and activations of the current layer.
        host: Offloaded bytes, which are not part of the total.
    """

    weights: Numbers
    gradients: Numbers
    optimizer: Numbers
    activations: Numbers
    temporaries: Numbers
    host: Numbers

    @property
    def total(self) -> Numbers:
        """HBM of one device, without offloaded bytes."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.temporaries

    def to_dict(self) -> JsonObject:
        """Return bytes by purpose and in total."""
        names = ("weights", "gradients", "optimizer", "activations", "temporaries", "host")
        return {**{name: getattr(self, name) for name in names}, "total": self.total}


def rounds_first(generation: str) -> bool:
    """Whether compiled loops over layers keep a rounded copy of all weights on this chip."""
    return bool(ChipRates.of(generation).rounds_weights_first)


def estimate_memory_bytes(
    shape: ModelShape,
    mesh: MeshRoles,
    *,
    per_device_batch: Numbers,
    sequence_length: Numbers,
    remat: str = FULL,
    remat_every: int = 1,
    optimizer_bytes: Numbers = ADAMW_BYTES,
    param_bytes: Numbers = FLOAT32,
    compute_bytes: Numbers = BFLOAT16,
    microbatches: Numbers = 1,
    whole_copy: Numbers = True,
    eight_bits: Numbers = False,
) -> MemorySplit:
    """Return the memory of one device.

    Args:
        shape: The model.
        mesh: Devices by role.
        per_device_batch: Examples per device and step, over all microbatches.
        sequence_length: Tokens in an example.
        remat: Remat policy as in job files: "none", "minimal", "full", "save=… offload=…".
        remat_every: Layers per segment; only the input of each segment is kept.
        optimizer_bytes: Optimizer state per parameter, from `state_bytes_per_parameter`.
        param_bytes: Bytes per master parameter; gradients of layers have the width of activations
            until they are summed.
        compute_bytes: Bytes per activation.
        microbatches: Microbatches per step.
        whole_copy: Whether the weights of all layers are rounded before the first layer runs;
            `rounds_first` knows for which chips.
        eight_bits: Whether matmuls round their operands to 8 bits, which are then stored in
            addition.
    """
    tokens = per_device_batch * sequence_length / mesh.context / microbatches
    kept = offloaded = 0.0 * tokens
    for layer in shape.kinds:
        segments = layer.count / mesh.stage / remat_every
        on_device, on_host = _kept_bytes(layer, mesh, tokens, remat, compute_bytes)
        kept, offloaded = kept + on_device * segments, offloaded + on_host * segments
    # A pipeline keeps the inputs of all microbatches in flight.
    in_flight = 2 * mesh.stage - 1
    # Sequential microbatches sum their gradients; those of a pipeline need not.
    one_by_one = (np.asarray(microbatches) > 1) & (np.asarray(mesh.stage) == 1)
    held = _held(shape, mesh, optimizer_bytes, param_bytes, compute_bytes, whole_copy)
    summed = np.where(one_by_one, held.summed, 0.0)
    # The gathered embedding table stays alive between microbatches.
    table = np.where(one_by_one, shape.head_parameters / mesh.tensor * compute_bytes, 0.0)
    token_logits = shape.vocab / mesh.tensor * compute_bytes
    uncut = np.minimum(tokens, np.maximum(LOGITS_BYTES / token_logits, MIN_CHUNK_TOKENS))
    logits = uncut * token_logits
    in_loss = _loss(shape, mesh, logits, tokens > uncut, compute_bytes)
    # The gradient of logits that are not chunked is alive until the layers' gradients are done. Of
    # several kinds of layers, the largest decides.
    hidden_kept = 0 if shape.thin is None else shape.thin.hidden_kept
    token_work = _most(
        _token_work(layer, mesh, compute_bytes, hidden_kept) for layer in shape.kinds
    )
    token_work = token_work * remat_every
    # Compiled int8 steps need 22 (llama3.1-8b), 65 (gpt3-175b) and 71 kB (16B of MaxText) per token
    # more than bfloat16 ones; one byte per channel of a block and of its input gives 18, 61 and 31.
    rounded_work = max(layer.hidden_width for layer in shape.kinds) / mesh.tensor + shape.d_model
    token_work = token_work + np.where(eight_bits, rounded_work, 0.0)
    in_layer = _Moment(
        held.gradients + held.waiting,
        held.decoded
        + held.turned
        + np.maximum(tokens * token_work, uncut * token_work + logits)
        + _most(_gathered(layer, mesh, compute_bytes) for layer in shape.kinds),
    )
    activations = kept * in_flight
    most = in_layer.or_larger(in_loss)
    at_end = _Moment(held.gradients + held.scattered, 0.0 * tokens)
    is_end = at_end.total + kept * (in_flight - 1) > most.total + activations
    return MemorySplit(
        weights=held.weights,
        gradients=summed + np.where(is_end, at_end.gradients, most.gradients),
        optimizer=held.optimizer,
        activations=np.where(is_end, kept * (in_flight - 1), activations),
        temporaries=held.copies + held.padding + table + np.where(is_end, 0.0, most.temporaries),
        host=offloaded * in_flight,
    )


@dataclass(frozen=True)
class _Held:
    """Bytes that depend on parameters, whatever the batch.

    Attributes:
        gradients: Gradients of all trained parameters, before they are summed.
        summed: The summed gradients.
        copies: Rounded copies of all layers' weights, made before the first layer runs.
        turned: Transposed embedding tables, while layers run.
        padding: Padding of expert matrices, which are not sharded into whole lanes as others are.
        waiting: Gradients of layers of the current loop iteration, which are stacked at its end.
        scattered: Gradient of per-layer embeddings, which comes last: replicated on every device,
            once for adding rows and once for adding devices. The gradient of the model's own table
            is smaller than what the loss keeps of the head.
        decoded: The decoded copy of the quantized matrix in use.
    """

    weights: Numbers
    optimizer: Numbers
    gradients: Numbers
    summed: Numbers
    copies: Numbers
    turned: Numbers = 0.0
    padding: Numbers = 0.0
    waiting: Numbers = 0.0
    scattered: Numbers = 0.0
    decoded: Numbers = 0.0


def _held(
    shape: ModelShape,
    mesh: MeshRoles,
    optimizer_bytes: Numbers,
    param_bytes: Numbers,
    compute_bytes: Numbers,
    whole_copy: Numbers,
) -> _Held:
    split = mesh.fsdp * mesh.tensor * mesh.stage
    thin = shape.thin
    if thin is not None:
        # LoRA matrices are sharded along `fsdp` and rounded before the first layer.
        own = thin.base_bytes / split + thin.expert_bytes / (split * mesh.expert)
        trained = thin.parameters / mesh.fsdp
        return _Held(
            weights=own + trained * param_bytes,
            optimizer=trained * optimizer_bytes,
            gradients=trained * compute_bytes,
            summed=trained * param_bytes,
            copies=trained * compute_bytes,
            decoded=thin.decoded_bytes / mesh.tensor,
        )
    own_experts = shape.expert_parameters / (split * mesh.expert)
    own = shape.other_parameters / split + own_experts
    own_layers = own - shape.outside_parameters / split
    padding = shape.expert_padding / (split * mesh.expert)
    # Experts are rounded where they are used, inside the region of their kernels; layers of
    # alternating kinds where they are sliced out of their stacks.
    rounds = np.asarray(whole_copy) & (shape.turn == 1)
    adds_up = np.asarray(mesh.fsdp) * mesh.data > 1
    return _Held(
        weights=own * param_bytes,
        optimizer=own * optimizer_bytes,
        gradients=(own_layers + shape.head_parameters / split) * compute_bytes,
        summed=own * param_bytes,
        copies=np.where(rounds, (own_layers - own_experts) * compute_bytes, 0.0),
        turned=_turned_tables(shape, mesh, param_bytes),
        padding=padding * (param_bytes + optimizer_bytes + compute_bytes),
        waiting=own_layers * compute_bytes * (shape.turn - 1) / shape.layers_run,
        scattered=shape.layer_tables / mesh.tensor * compute_bytes * np.where(adds_up, 2, 1),
    )


def _turned_tables(shape: ModelShape, mesh: MeshRoles, param_bytes: Numbers) -> Numbers:
    """Return bytes of transposed tables, needed if a device's channels do not fill lanes.

    The compiler stores such an array with rows along the lanes, without padding, but looks rows up,
    and adds their gradients, in a copy with channels along the lanes.
    """
    copies: Numbers = 0.0
    for width in (shape.d_model, shape.layer_tables / shape.vocab):
        channels = width / np.asarray(mesh.fsdp)
        filled = 2 * shape.vocab / mesh.tensor * in_tiles(channels, LANES) * param_bytes
        copies = copies + np.where(channels % LANES > 0, filled, 0.0)
    return copies


@dataclass(frozen=True)
class _Moment:
    """Memory at one moment, without parameters, optimizer state and kept activations."""

    gradients: Numbers
    temporaries: Numbers

    @property
    def total(self) -> Numbers:
        return self.gradients + self.temporaries

    def or_larger(self, other: "_Moment") -> "_Moment":
        larger = self.total > other.total
        return _Moment(
            np.where(larger, self.gradients, other.gradients),
            np.where(larger, self.temporaries, other.temporaries),
        )


def _most(values: Iterable[Numbers]) -> Numbers:
    """Return the elementwise maximum."""
    return reduce(np.maximum, values)


def _kept_bytes(
    layer: LayerShape, mesh: MeshRoles, tokens: Numbers, remat: str, compute_bytes: Numbers
) -> tuple[Numbers, Numbers]:
    """Return the bytes of one layer's kept activations, on the device and on the host."""
    kept = kept_by(remat)
    if kept.everything:
        # Heads are padded to whole lanes.
        queries, values = max(layer.qk_dim, LANES), max(layer.v_dim, LANES)
        heads = (layer.heads + layer.kv_heads) * (queries + values)
        split = heads + 2 * layer.hidden_matrices * layer.hidden_width
        channels = split / mesh.tensor + MemoryRates.of().kept_model * layer.d_model
        return tokens * channels * compute_bytes, 0.0 * tokens
    token_bytes = {
        name: channels * compute_bytes / (mesh.tensor if name in SPLIT_BY_TENSOR else 1)
        for name, channels in kept_channels(layer).items()
    }
    # The softmax sum is one float32 per head and token.
    sums = 0 if layer.linear else layer.heads * FLOAT32
    token_bytes[ATTENTION] += sums / mesh.tensor
    on_device, on_host = (
        tokens * sum((token_bytes.get(name, 0.0) for name in names), 0.0)
        for names in (kept.device, kept.host)
    )
    return on_device, on_host


def _loss(
    shape: ModelShape, mesh: MeshRoles, logits: Numbers, cut: Numbers, compute_bytes: Numbers
) -> _Moment:
    """Return the moment in the loss: logits, the head, and the gradients of both."""
    head = shape.head_parameters / mesh.tensor
    if shape.thin is not None:  # no gradient of the head, and no copy of it but a gathered one
        gathered = (np.asarray(mesh.fsdp) > 1) | shape.tied
        return _Moment(np.where(cut, 0.0, logits), logits + head * compute_bytes * gathered)
    # Chunks sum the head's gradient in float32; whole logits have a gradient of their own size.
    gradients = np.maximum(logits, np.where(cut, head * FLOAT32, 0.0))
    copies = head * compute_bytes * np.where(cut & shape.tied, 2, 1)  # a tied head is transposed
    return _Moment(gradients, logits + copies)


def _token_work(
    layer: LayerShape, mesh: MeshRoles, compute_bytes: Numbers, hidden_kept: int
) -> Numbers:
    """Return the bytes per token while a layer's gradient is computed."""
    rates = MemoryRates.of()
    heads = rates.working_heads * layer.heads * layer.head_dim
    split = rates.working_hidden * layer.dense_width + hidden_kept * layer.hidden_width + heads
    whole = rates.working_model * layer.d_model + _rows_work(layer, mesh)
    return (split / mesh.tensor + whole) * compute_bytes


def _rows_work(layer: LayerShape, mesh: MeshRoles) -> Numbers:
    """Return the channels per token of the experts' rows while their gradient is computed.

    The peak is either where expert outputs are weighted (rows in, rows out, the gradients of both
    sums, and the hidden rows), or in the backward pass of their last matmul (rows in, the gradient
    of rows out; gate, up, hidden, and the gradient of hidden). With an expert axis, buffers have
    room for every row that all devices could send to one.
    """
    hidden = in_tiles(layer.expert_width / np.asarray(mesh.tensor), LANES)
    stream = in_tiles(layer.d_model, LANES)
    own = layer.experts_per_token * layer.expert_rows
    is_sent = (np.asarray(mesh.expert) > 1) & layer.sorted_rows
    here = own * np.where(is_sent, mesh.expert, 1)
    # A row is sent as two halves of whole lanes; other widths are copied both ways.
    copied = np.where(
        is_sent & (layer.d_model % (2 * LANES) > 0), 4 * in_tiles(layer.d_model / 2, LANES), 0
    )
    return np.maximum(own * (4 * stream + hidden), here * (2 * stream + 4 * hidden + copied))


def _gathered(layer: LayerShape, mesh: MeshRoles, compute_bytes: Numbers) -> Numbers:
    """Return the weights of a layer that are gathered along `fsdp` at one time."""
    channel = layer.d_model / mesh.tensor * compute_bytes
    gathered = MemoryRates.of().gathered_matrices * layer.dense_width * channel
    if layer.experts:
        # All matrices of experts are gathered together, and one gradient waits to be sent.
        wide = layer.d_model * in_tiles(layer.expert_width / np.asarray(mesh.tensor), LANES)
        narrow = in_tiles(layer.d_model, LANES) * layer.expert_width / mesh.tensor
        matrices = (layer.hidden_matrices * wide + narrow) * layer.experts / mesh.expert
        gathered = gathered + matrices * compute_bytes
    return np.where(np.asarray(mesh.fsdp) > 1, gathered, 0.0)


def host_bytes(memory: MemorySplit, shape: ModelShape, devices_per_host: Numbers) -> Numbers:
    """Return the most bytes that one host needs: to train and checkpoint, or to restore.

    Exports are not counted, because they may run on another machine; `check` reports their memory.

    State that is replicated over devices is counted on each, although they share its writing. Where
    it matters, that is with offloaded activations, state is sharded.

    Args:
        memory: Memory of one device.
        shape: The model.
        devices_per_host: Devices per host of each candidate.
    """
    largest = max(formats.FLOAT32.nbytes(int(np.prod(size))) for size in shape.parameter_shapes)
    state = (memory.weights + memory.optimizer) * devices_per_host
    training = memory.host * devices_per_host + state
    under_way = np.minimum(state, read_limit_bytes(largest, READ_AT_ONCE_BYTES))
    return np.maximum(training, HELD_WHILE_READ * under_way)


_PURPOSES = {"parameters": "weights", "optimizer state": "optimizer"}
_KEPT = ("weights", "gradients", "optimizer", "activations")


def split_of(memory: MemoryReport) -> MemorySplit:
    """Return the compiler's bytes of one device by purpose; they add up to its total."""
    amounts: dict[str, float] = dict.fromkeys((*_KEPT, "temporaries"), 0.0)
    for name, size in memory.purposes.items():
        known = _PURPOSES.get(name, name)
        amounts[known if known in _KEPT else "temporaries"] += size
    return MemorySplit(**amounts, host=float(memory.host_bytes))

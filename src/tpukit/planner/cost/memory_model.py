"""Memory of a training step on one device by arithmetic, for one candidate or for arrays of them.

Every argument that differs between candidates may be a numpy array; they broadcast. Most is alive
at one of three moments, and the largest decides: in the loss, when every layer has kept what the
backward pass needs and the head's gradient lies there whole; in the backward pass of a layer, when
the gradients of all layers have their room and one layer is at work; or at its end, when nothing is
kept any more and the gradient of layers' own embeddings lies there whole. That is how the
compiler's own reports divide. Parameters, optimizer state and what a remat policy keeps are
counted; the amounts in `hardware.rates.MemoryRates` are read off those reports
(`benchmarks/memory_estimate.py` says which, and prints the error).
"""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce
from typing import Any

import numpy as np

from ...hardware import formats
from ...hardware.rates import ChipRates, MemoryRates
from ...step.optimizer.spec import OptimizerSpec, state_bytes_per_parameter
from .kept import ATTENTION, SPLIT_BY_TENSOR, kept_by, kept_channels
from .layer_shape import LANES, LayerShape, in_tiles
from .model_shape import ModelShape

FLOAT32, BFLOAT16 = formats.FLOAT32.itemsize, formats.BFLOAT16.itemsize  # bytes of a value
ADAMW_BYTES = state_bytes_per_parameter(OptimizerSpec())
# Cutting of the loss: kernels/ops/cross_entropy/chunked.py, which imports jax.
LOGITS_BYTES = 512 * 2**20
MIN_CHUNK_TOKENS = 2048

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
    """Bytes on one device by purpose, at the moment when most is alive (origin: model).

    Attributes:
        gradients: Those that exist at that moment: the head's in the loss, the layers' later.
        temporaries: Copies of weights, logits, and the activations of the layer at work.
        host: What is offloaded; not part of the total.
    """

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


def rounds_first(generation: str) -> bool:
    """Whether compiled loops over layers hold a rounded copy of all weights."""
    return bool(ChipRates.of(generation).rounds_weights_first)


def estimate_memory_bytes(
    shape: ModelShape,
    mesh: MeshRoles,
    *,
    per_device_batch: Numbers,
    sequence_length: Numbers,
    remat: str = "full",
    remat_every: int = 1,
    optimizer_bytes: Numbers = ADAMW_BYTES,
    param_bytes: Numbers = FLOAT32,
    compute_bytes: Numbers = BFLOAT16,
    microbatches: Numbers = 1,
    whole_copy: Numbers = True,
    eight_bits: Numbers = False,
) -> MemorySplit:
    """The memory of one device.

    Args:
        shape: The model.
        mesh: Devices by role.
        per_device_batch: Examples a device and step, over all micro-batches.
        sequence_length: Tokens in an example.
        remat: As job files spell it: "none", "minimal", "full", "save=… offload=…".
        remat_every: Layers of a segment: only the input of every so many is kept.
        optimizer_bytes: State of the optimizer for one parameter, as
            `state_bytes_per_parameter` counts it.
        param_bytes: Bytes of one master parameter; gradients of layers have those of activations
            until they are added up.
        compute_bytes: Bytes of one activation.
        microbatches: Pieces a step is cut into.
        whole_copy: Whether the weights of all layers are rounded before the first one runs;
            `rounds_first` says of which chips that is known.
        eight_bits: Whether products round their operands, which then lie beside what they are of.
    """
    tokens = per_device_batch * sequence_length / mesh.context / microbatches
    kept = offloaded = 0.0 * tokens
    for layer in shape.kinds:
        segments = layer.count / mesh.stage / remat_every
        on_device, on_host = _kept_bytes(layer, mesh, tokens, remat, compute_bytes)
        kept, offloaded = kept + on_device * segments, offloaded + on_host * segments
    # A pipeline holds the inputs of the micro-batches that are on their way.
    in_flight = 2 * mesh.stage - 1
    # Micro-batches one after the other add their gradients up; those of a pipeline need not.
    one_by_one = (np.asarray(microbatches) > 1) & (np.asarray(mesh.stage) == 1)
    held = _held(shape, mesh, optimizer_bytes, param_bytes, compute_bytes, whole_copy)
    summed = np.where(one_by_one, held.summed, 0.0)
    # Between micro-batches the gathered table of embeddings stays.
    table = np.where(one_by_one, shape.head_parameters / mesh.tensor * compute_bytes, 0.0)
    token_logits = shape.vocab / mesh.tensor * compute_bytes
    uncut = np.minimum(tokens, np.maximum(LOGITS_BYTES / token_logits, MIN_CHUNK_TOKENS))
    logits = uncut * token_logits
    in_loss = _loss(shape, mesh, logits, tokens > uncut, compute_bytes)
    # The gradient of logits that are not cut waits until the layers' gradients are done.
    # Of several kinds the one that takes most decides.
    hidden_kept = 0 if shape.thin is None else shape.thin.hidden_kept
    token_work = _most(
        _token_work(layer, mesh, compute_bytes, hidden_kept) for layer in shape.kinds
    )
    token_work = token_work * remat_every
    # Compiled steps in int8 need 22 (llama3.1-8b), 65 (gpt3-175b) and 71 kB a token more than in
    # bfloat16 (16B of MaxText); a byte for each channel of a block and of its input is 18, 61, 31.
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
    """What a device holds of parameters, whatever batch it works on.

    Attributes:
        gradients: Of all that is trained, until they are added up.
        summed: The same, added up.
        copies: What the weights of all layers are written to before the first one runs.
        turned: Tables in the order in which rows are looked up, while layers are at work.
        padding: Of experts, whose matrices lie whole in both dimensions; those of other matrices
            are cut so that whole lanes are left.
        waiting: Gradients of layers whose turn of the loop has not ended; with its last layer they
            are put where the others of their stack are.
        scattered: The gradient of embeddings that single layers read, which comes last: whole on
            every device, once as rows are added up there and once as devices are. That of the
            model's own is narrower than what the loss holds of the head.
        decoded: What the matrix at work is decoded to.
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
        # Thin matrices are cut along `fsdp`, and rounded before the first layer.
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
    # Experts are rounded where they are used, inside the region that their kernels need; layers
    # that take turns where they are cut out of their stacks.
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
    """Tables, and one moment of each, copied because a device's channels do not fill lanes.

    The compiler keeps such an array with its rows along the lanes, where nothing is padded, and
    looks rows up, and adds their gradients, in one that has channels there.
    """
    copies: Numbers = 0.0
    for width in (shape.d_model, shape.layer_tables / shape.vocab):
        channels = width / np.asarray(mesh.fsdp)
        filled = 2 * shape.vocab / mesh.tensor * in_tiles(channels, LANES) * param_bytes
        copies = copies + np.where(channels % LANES > 0, filled, 0.0)
    return copies


@dataclass(frozen=True)
class _Moment:
    """What is alive at one moment beside parameters, optimizer state and kept activations."""

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
    """The largest of several numbers, or of the arrays of them place by place."""
    return reduce(np.maximum, values)


def _kept_bytes(
    layer: LayerShape, mesh: MeshRoles, tokens: Numbers, remat: str, compute_bytes: Numbers
) -> tuple[Numbers, Numbers]:
    """Bytes of one layer's activations kept on the device, and on the host."""
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
    # One float32 for each head and token says what its scores add up to.
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
    """Logits at work, the head, and the gradient of either."""
    head = shape.head_parameters / mesh.tensor
    if shape.thin is not None:  # no gradient of the head, and no copy of it but a gathered one
        gathered = (np.asarray(mesh.fsdp) > 1) | shape.tied
        return _Moment(np.where(cut, 0.0, logits), logits + head * compute_bytes * gathered)
    # Chunks add the head's gradient up in float32; whole logits have one of their own size.
    gradients = np.maximum(logits, np.where(cut, head * FLOAT32, 0.0))
    copies = head * compute_bytes * np.where(cut & shape.tied, 2, 1)  # a tied head is transposed
    return _Moment(gradients, logits + copies)


def _token_work(
    layer: LayerShape, mesh: MeshRoles, compute_bytes: Numbers, hidden_kept: int
) -> Numbers:
    """Bytes that one token takes while a layer's gradient is computed."""
    rates = MemoryRates.of()
    heads = rates.working_heads * layer.heads * layer.head_dim
    split = rates.working_hidden * layer.dense_width + hidden_kept * layer.hidden_width + heads
    whole = rates.working_model * layer.d_model + _rows_work(layer, mesh)
    return (split / mesh.tensor + whole) * compute_bytes


def _rows_work(layer: LayerShape, mesh: MeshRoles) -> Numbers:
    """Channels of one token in the rows of its experts, while their gradient is computed.

    Most is alive when what experts gave is weighed (rows in, rows out, the gradient of either sum,
    and the hidden ones), or when their last product is gone back through (rows in, the gradient of
    rows out; gate, up, hidden, and the gradient of hidden). The products of an expert axis have
    room for every row that all of its devices could send to one.
    """
    hidden = in_tiles(layer.expert_width / np.asarray(mesh.tensor), LANES)
    stream = in_tiles(layer.d_model, LANES)
    own = layer.experts_per_token * layer.expert_rows
    is_sent = (np.asarray(mesh.expert) > 1) & layer.sorted_rows
    here = own * np.where(is_sent, mesh.expert, 1)
    # A row is sent as two halves of whole lanes: where it has others, through copies both ways.
    copied = np.where(
        is_sent & (layer.d_model % (2 * LANES) > 0), 4 * in_tiles(layer.d_model / 2, LANES), 0
    )
    return np.maximum(own * (4 * stream + hidden), here * (2 * stream + 4 * hidden + copied))


def _gathered(layer: LayerShape, mesh: MeshRoles, compute_bytes: Numbers) -> Numbers:
    """Weights of a layer that are gathered along `fsdp` at once."""
    channel = layer.d_model / mesh.tensor * compute_bytes
    gathered = MemoryRates.of().gathered_matrices * layer.dense_width * channel
    if layer.experts:
        # Experts are gathered together, all their matrices, and one gradient waits to be sent.
        wide = layer.d_model * in_tiles(layer.expert_width / np.asarray(mesh.tensor), LANES)
        narrow = in_tiles(layer.d_model, LANES) * layer.expert_width / mesh.tensor
        matrices = (layer.hidden_matrices * wide + narrow) * layer.experts / mesh.expert
        gathered = gathered + matrices * compute_bytes
    return np.where(np.asarray(mesh.fsdp) > 1, gathered, 0.0)

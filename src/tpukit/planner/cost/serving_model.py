"""What a served model takes: bytes of weights and cache, and the roofs of decoding and prompts.

A slice holds replicas of the model, each split over a `tensor` axis. Products wait for FLOPs or for
their weights, attention for FLOPs or for the cache, whichever takes longer; what devices exchange
comes on top. Nothing else is counted: a server schedules, samples and starts ops as well, so that
these rates are bounds.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ...compiler.timeline.machine import Machine
from ...hardware import Slice
from ...hardware.formats import BFLOAT16
from ...hardware.rates import MemoryRates
from ...hardware.stored_formats import WEIGHT_FORMATS
from .attention_time import FORWARD_PRODUCTS, visited_keys
from .model_shape import ModelShape
from .torus import Links, place_axes


@dataclass(frozen=True)
class Matrices:
    """Weights of one kind: `count` matrices that rows of width `rows` are multiplied with."""

    rows: int
    columns: int
    count: int
    of_experts: bool = False

    @property
    def parameters(self) -> int:
        """Parameters of all of them."""
        return self.rows * self.columns * self.count

    def nbytes(self, weights: str) -> int:
        """Bytes of all of them in a weight format."""
        return self.count * WEIGHT_FORMATS[weights].nbytes(self.rows, self.columns)


def layer_matrices(shape: ModelShape) -> Iterator[Matrices]:
    """The matrices of all layers, which is what may be kept narrow."""
    s, width = shape, shape.heads * shape.head_dim
    yield Matrices(s.d_model, width, s.layers)
    yield Matrices(s.d_model, s.kv_heads * s.head_dim, 2 * s.layers)
    yield Matrices(width, s.d_model, s.layers)
    blocks = s.layers * max(1, s.experts)
    yield Matrices(s.d_model, s.d_ff, (s.hidden_matrices - 1) * blocks, bool(s.experts))
    yield Matrices(s.d_ff, s.d_model, blocks, bool(s.experts))


def weight_bytes(shape: ModelShape, weights: str) -> int:
    """Bytes of all weights; tables, norms, biases and routers stay in bfloat16."""
    matrices = list(layer_matrices(shape))
    others = shape.parameters - sum(one.parameters for one in matrices)
    return sum(one.nbytes(weights) for one in matrices) + BFLOAT16.nbytes(others)


def keys_held(shape: ModelShape, context: int) -> int:
    """Keys of one sequence in all layers; a local one holds no more than its window."""
    local = shape.layers - shape.global_layers
    return shape.global_layers * context + local * min(context, shape.window or context)


def cache_bytes(shape: ModelShape, batch: int, context: int) -> float:
    """Bytes of keys and values of all layers."""
    held = keys_held(shape, context) * batch
    return float(BFLOAT16.nbytes(2 * shape.kv_heads * shape.head_dim * held))


def weight_bytes_read(shape: ModelShape, weights: str, rows: int) -> float:
    """Bytes of weights that a pass over `rows` tokens reads, each once.

    Embeddings are looked up, so of a table that is not also the head only a few rows are read; of
    an MoE only the experts that some row chooses.
    """
    whole = float(weight_bytes(shape, weights))
    if not shape.tied:
        whole -= BFLOAT16.nbytes(shape.head_parameters)
    if not shape.experts:
        return whole
    untouched = (1 - shape.experts_per_token / shape.experts) ** rows
    experts = sum(one.nbytes(weights) for one in layer_matrices(shape) if one.of_experts)
    return whole - experts * untouched


ROOFS = ("flops", "hbm", "network")
FLOPS_PER_WEIGHT = 2


@dataclass(frozen=True, kw_only=True)
class Pass:
    """Seconds of one pass of a replica over some tokens, by what they wait for (origin: model).

    Attributes:
        tokens: Of all replicas together.
        flops: Seconds that products and attention wait for the matrix unit.
        hbm: Seconds that they wait for weights and cache.
        network: Seconds of sums between the devices of a replica.
    """

    tokens: int
    flops: float
    hbm: float
    network: float

    @property
    def seconds(self) -> float:
        """The whole pass."""
        return self.flops + self.hbm + self.network

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of all replicas."""
        return self.tokens / self.seconds

    @property
    def bound_by(self) -> str:
        """What most of it waits for."""
        return max(ROOFS, key=lambda roof: getattr(self, roof))


@dataclass(frozen=True)
class Server:
    """A slice that serves a model in replicas of `tensor` devices.

    Attributes:
        weights: Their format, as `WEIGHT_FORMATS` names it.
        batch: Sequences served at once, over all replicas.
        context: Tokens each of them holds.
    """

    shape: ModelShape
    slice: Slice
    weights: str
    batch: int
    context: int
    tensor: int

    @property
    def replicas(self) -> int:
        """Copies of the weights."""
        return self.slice.devices // self.tensor

    @property
    def sequences(self) -> int:
        """Sequences of the fullest replica."""
        return math.ceil(self.batch / self.replicas)

    @property
    def device_bytes(self) -> float:
        """Weights and cache on one device."""
        held = weight_bytes(self.shape, self.weights)
        return (held + cache_bytes(self.shape, self.sequences, self.context)) / self.tensor

    @property
    def fits(self) -> bool:
        """Whether a device has room for them."""
        return self.device_bytes <= room_bytes(self.slice)

    def decode(self) -> Pass:
        """One more token for every sequence: all weights and each sequence's cache are read."""
        s, rows = self.shape, self.sequences
        pairs = keys_held(s, self.context) * rows
        return self._pass(rows, self.batch, pairs, pairs, self._peak)

    def prefill(self) -> Pass:
        """A prompt of `context` tokens in every replica."""
        s = self.shape
        local = s.layers - s.global_layers
        seen = s.global_layers * visited_keys(self.context, None)
        seen += local * visited_keys(self.context, s.window) if local else 0.0
        reached = self._attention_flops
        written = keys_held(s, self.context)
        prompts = self.context * self.replicas
        return self._pass(self.context, prompts, seen * self.context, written, reached)

    def _pass(
        self, rows: int, tokens: int, pairs: float, cached: float, attention_flops: float
    ) -> Pass:
        """Of `rows` tokens of a replica that meet `pairs` keys and move `cached` of them."""
        s, split = self.shape, self.tensor
        products = FLOPS_PER_WEIGHT * s.matmul_parameters * rows / split / self._peak
        read = weight_bytes_read(s, self.weights, rows) / split / self._hbm
        per_pair = FORWARD_PRODUCTS * FLOPS_PER_WEIGHT * s.heads * s.head_dim
        scores = per_pair * pairs / split / attention_flops
        pair_bytes = BFLOAT16.nbytes(2 * s.kv_heads * s.head_dim)
        keys = pair_bytes * cached / split / self._hbm
        waits = ((products, read), (scores, keys))
        return Pass(
            tokens=tokens,
            flops=sum(flops for flops, moved in waits if flops >= moved),
            hbm=sum(moved for flops, moved in waits if flops < moved),
            network=self._network(rows),
        )

    def _network(self, rows: int) -> float:
        """Two sums of activations in every layer; past the heads of keys one more joins results."""
        sums = 2 + (self.tensor > self.shape.kv_heads)
        amount = BFLOAT16.nbytes(rows * self.shape.d_model)
        machine, links = self._machine, self._links
        once = amount * links.share / (links.lanes * machine.ici_bytes_per_s)
        return self.shape.layers * sums * 2 * (once + links.hops * machine.hop_latency_s)

    @property
    def _machine(self) -> Machine:
        return Machine.of(self.slice)

    @property
    def _links(self) -> Links:
        return place_axes(self.slice, {"tensor": self.tensor}).get("tensor", Links())

    @property
    def _peak(self) -> float:
        """FLOP/s of products: narrow weights are widened, so they are those of bfloat16."""
        return self._machine.peak_flops("bf16") * self._machine.matrix_efficiency

    @property
    def _attention_flops(self) -> float:
        share = self._machine.attention_share(self.shape.head_dim)
        return self._machine.peak_flops("bf16") * share

    @property
    def _hbm(self) -> float:
        """Bytes a second: what streaming ops reach, and no more than a measured copy."""
        machine, chip = self._machine, self.slice.chip
        alone = machine.hbm_bytes_per_s * machine.hbm_efficiency * machine.op_time_in_a_step
        copied = chip.measured.get("hbm_copy_gbps")
        if copied is None:
            return alone
        return min(alone, chip.per_device(copied).require("serving") * 1e9)


def room_bytes(on: Slice) -> float:
    """What weights and cache may take of one device."""
    usable = on.chip.per_device(on.chip.hbm_usable_bytes).require("serving")
    return usable * (1 - MemoryRates.of().serving_headroom)


def servers_on(
    on: Slice, shape: ModelShape, *, weights: str, batch: int, context: int
) -> Iterator[Server]:
    """Every split of a slice into replicas that a device has room for."""
    devices = on.devices // on.num_slices
    powers = (2**power for power in range(devices.bit_length()))
    for tensor in sorted({*(size for size in powers if devices % size == 0), devices}):
        server = Server(shape, on, weights, batch, context, tensor)
        if server.fits:
            yield server

"""Time of a token and of a prompt on a served model, by cause.

A slice has replicas of the model, each sharded over a `tensor` axis. Matmuls are bound by FLOPs or
by reading weights, attention by FLOPs or by reading the cache, whichever is longer. Communication
and op launches are added. The server's own work (scheduling, sampling, tokenizing) is not counted,
because it overlaps with the device in servers with published figures.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from ...compiler.timeline.machine import Machine
from ...hardware import Slice
from ...hardware.formats import BFLOAT16, FLOAT32
from ...hardware.rates import MemoryRates, ServingRates, StepRates
from ...hardware.stored_formats import CACHE_FORMATS, Unit
from ...models.transformer.config import TransformerConfig
from ...models.transformer.layer_config import LayerConfig
from ...models.transformer.shapes import parameter_shapes
from .attention_time import visited_keys
from .model_shape import Matrices, layer_matrices
from .torus import Links, place_axes


@dataclass(frozen=True)
class ServedKind:
    """All layers of one kind.

    Attributes:
        layers: Number of layers.
        matrices: Matrices of all these layers.
    """

    layer: LayerConfig
    layers: int
    matrices: tuple[Matrices, ...]

    def tokens_held(self, context: int) -> int:
        """Tokens of a sequence in the cache of a layer."""
        return self.layer.reach(context) or context

    @property
    def units(self) -> tuple[Unit, ...]:
        """Cache units that attention of one layer reads per token."""
        c = self.layer
        if c.delta is not None:
            return ()
        if c.latent is not None:
            return Unit(1, c.latent.kv_rank), Unit(1, c.latent.rope_dim)
        return (Unit(2 * c.n_kv_heads, c.head_dim),)

    @property
    def state_bytes(self) -> int:
        """Bytes of the state of linear attention, per sequence and layer."""
        d = self.layer.delta
        if d is None:
            return 0
        state = FLOAT32.nbytes(d.value_heads * d.key_dim * d.value_dim)
        channels = 2 * d.key_heads * d.key_dim + d.value_heads * d.value_dim
        return state + BFLOAT16.nbytes((d.convolution - 1) * channels)

    def cache_bytes(self, context: int, cache: str) -> int:
        """Return the cache bytes per sequence; layers that share another layer's keys have none.

        Codebooks are not counted, because all sequences share them.
        """
        if self.layer.shares_keys_of is not None:
            return 0
        return self.layers * (self.state_bytes + self._read(self.tokens_held(context), cache))

    def bytes_attended(self, context: int, cache: str) -> int:
        """Return the bytes that one more token of a sequence reads; a state is also written."""
        read = self._read(self.tokens_held(context), cache)
        return self.layers * (2 * self.state_bytes + read)

    def _read(self, tokens: int, cache: str) -> int:
        return CACHE_FORMATS[cache].nbytes(self.units, tokens)

    @property
    def key_heads(self) -> int:
        """Number of parts that the cache can be split into by heads."""
        c = self.layer
        return 1 if c.latent is not None else c.delta.value_heads if c.delta else c.n_kv_heads

    @property
    def joined_width(self) -> int:
        """Channels of attention's result, which is summed if devices have different tokens."""
        c = self.layer
        return c.n_heads * (c.latent.kv_rank if c.latent is not None else c.v_dim)

    def token_products(self, context: int) -> float:
        """Return the multiply-adds of attention for one more token, in all these layers.

        Latents are used as stored, so every head multiplies with all of their channels.
        """
        c = self.layer
        if c.delta is not None:
            return self._state_products
        width = c.qk_dim + c.v_dim
        if c.latent is not None:
            width = 2 * c.latent.kv_rank + c.latent.rope_dim
        return float(self.layers * c.n_heads * width * self.tokens_held(context))

    def prompt_products(self, length: int) -> float:
        """Return the multiply-adds of attention for a prompt, by the blocks visited."""
        c = self.layer
        if c.delta is not None:
            return self._state_products * length
        if c.attention_chunk is not None and c.attention_chunk < length:
            keys = visited_keys(c.attention_chunk, None)
        else:
            keys = visited_keys(length, c.sliding_window)
        return self.layers * c.n_heads * (c.qk_dim + c.v_dim) * keys * length

    @property
    def _state_products(self) -> float:
        d = self.layer.delta
        assert d is not None
        # The state is read for the key, updated, and read for the query.
        return 3.0 * self.layers * d.value_heads * d.key_dim * d.value_dim


@dataclass(frozen=True)
class ServedModel:
    """Dimensions of a served transformer.

    Attributes:
        kinds: All kinds of layers.
        outside: Matrices outside the layers that every token is multiplied with, including the
            head.
        looked_up: Parameters of tables of which a token reads one row.
        others: All other parameters: norms, biases, sinks.
    """

    name: str
    max_seq_len: int
    d_model: int
    kinds: tuple[ServedKind, ...]
    outside: tuple[Matrices, ...]
    looked_up: int
    others: int

    @classmethod
    def of(cls, config: TransformerConfig) -> "ServedModel":
        """Return the served model of a configuration, without layers of multi-token prediction."""
        c = config
        order = Counter(c.layer_order)
        kinds = tuple(
            ServedKind(c.kinds[name], layers, layer_matrices(c.kinds[name], c.d_model, layers))
            for name, layers in order.items()
        )
        outside = [Matrices(c.d_model, c.vocab_size, 1, narrow=False)]
        looked_up = 0 if c.tied_embeddings else c.vocab_size * c.d_model
        if c.learned_positions:
            looked_up += c.max_seq_len * c.d_model
        if c.per_layer_width:
            width = c.n_layers * c.per_layer_width
            outside.append(Matrices(c.d_model, width, 1, narrow=False))
            looked_up += c.vocab_size * width
        held = sum(
            math.prod(shape)
            for path, shape in parameter_shapes(c).items()
            if not path.startswith("mtp/")
        )
        matrices = [one for kind in kinds for one in kind.matrices]
        counted = sum(one.parameters for one in (*matrices, *outside))
        others = held - counted - looked_up
        return cls(c.name, c.max_seq_len, c.d_model, kinds, tuple(outside), looked_up, others)

    @property
    def layers(self) -> int:
        """Layers of all kinds."""
        return sum(kind.layers for kind in self.kinds)

    @property
    def matrices(self) -> tuple[Matrices, ...]:
        """All matrices."""
        return (*(one for kind in self.kinds for one in kind.matrices), *self.outside)

    @property
    def parameters(self) -> int:
        """All parameters."""
        return sum(one.parameters for one in self.matrices) + self.looked_up + self.others

    @property
    def products(self) -> float:
        """Multiply-adds per token with weights."""
        return sum(one.products for one in self.matrices)

    def weight_bytes(self, weights: str) -> int:
        """Return the bytes of all weights; tables, norms, biases and routers stay in bfloat16."""
        wide = BFLOAT16.nbytes(self.looked_up + self.others)
        return sum(one.nbytes(weights) for one in self.matrices) + wide

    def bytes_read(self, weights: str, rows: int) -> float:
        """Return the bytes of weights that a pass over `rows` tokens reads.

        Of tables only a few rows are read, and of experts those that a row chooses.
        """
        wide = BFLOAT16.nbytes(self.others)
        return sum(one.bytes_read(weights, rows) for one in self.matrices) + wide

    def cache_bytes(self, context: int, cache: str = "bf16") -> int:
        """Return the cache bytes of one sequence in all layers."""
        return sum(kind.cache_bytes(context, cache) for kind in self.kinds)

    def bytes_attended(self, context: int, cache: str = "bf16") -> int:
        """Return the bytes of cache and states that one more token reads or writes."""
        return sum(kind.bytes_attended(context, cache) for kind in self.kinds)


ROOFS = ("flops", "hbm", "network", "starts")
FLOPS_PER_PRODUCT = 2


@dataclass(frozen=True, kw_only=True)
class ServedFormats:
    """Formats of weights, cache and activations, named as in `WEIGHT_FORMATS` and `CACHE_FORMATS`.

    Attributes:
        activations: Format that matmuls round activations to; it is faster only if weights have it
            too and the chip multiplies it.
    """

    weights: str = "bf16"
    cache: str = "bf16"
    activations: str = "bf16"

    def multiplied(self, on: Slice) -> str:
        """Return the format of the matmuls; narrow weights are converted to activations."""
        same = self.activations == self.weights and on.chip.multiplies(self.activations)
        return self.activations if same else "bf16"


@dataclass(frozen=True, kw_only=True)
class ServingTraffic:
    """Traffic of a server.

    Attributes:
        batch: Concurrent requests over all replicas.
        prompt: Prompt tokens per request.
        new: New tokens per request.
    """

    batch: int
    prompt: int
    new: int

    @property
    def context(self) -> int:
        """Tokens of a sequence at its end."""
        return self.prompt + self.new

    @property
    def mean_context(self) -> int:
        """Mean tokens of a sequence while its answer is generated."""
        return self.prompt + math.ceil(self.new / 2)


@dataclass(frozen=True, kw_only=True)
class ServingPass:
    """Seconds of one pass of a replica, by cause (origin: model).

    Attributes:
        tokens: Tokens of all replicas together.
        flops: Seconds bound by the matrix unit.
        hbm: Seconds bound by reading weights and cache.
        network: Seconds of all-reduces inside a replica.
        starts: Seconds of op launches.
    """

    tokens: int
    flops: float
    hbm: float
    network: float
    starts: float

    @property
    def seconds(self) -> float:
        """Seconds of the whole pass."""
        return self.flops + self.hbm + self.network + self.starts

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second over all replicas, without other passes."""
        return self.tokens / self.seconds

    @property
    def bound_by(self) -> str:
        """The cause with the most time."""
        return max(ROOFS, key=lambda roof: getattr(self, roof))


@dataclass(frozen=True)
class ServingThroughput:
    """Throughput and latency of a busy server, in which a new request follows each answer.

    A replica prefills one prompt at a time, and decoding pauses meanwhile. During one answer it
    prefills as many prompts as it has sequences.

    Attributes:
        decode_s: Seconds of a decode step for all sequences.
        prefill_s: Seconds of one prompt.
        sequences: Sequences per replica.
    """

    traffic: ServingTraffic
    decode_s: float
    prefill_s: float
    sequences: int

    @property
    def token_s(self) -> float:
        """Mean seconds between two tokens of an answer (time per output token)."""
        return self.decode_s + self.sequences * self.prefill_s / self.traffic.new

    @property
    def tokens_per_s(self) -> float:
        """New tokens per second over all requests."""
        return self.traffic.batch / self.token_s


@dataclass(frozen=True)
class Server:
    """A slice that serves a model in replicas of `tensor` devices."""

    model: ServedModel
    slice: Slice
    traffic: ServingTraffic
    tensor: int
    formats: ServedFormats = field(default_factory=ServedFormats)

    @property
    def replicas(self) -> int:
        """Copies of the weights."""
        return self.slice.devices // self.tensor

    @property
    def sequences(self) -> int:
        """Sequences of the fullest replica."""
        return math.ceil(self.traffic.batch / self.replicas)

    @property
    def device_bytes(self) -> float:
        """Bytes of weights and cache per device."""
        held = self.model.cache_bytes(self.traffic.context, self.formats.cache)
        whole = self.model.weight_bytes(self.formats.weights) + held * self.sequences
        return whole / self.tensor

    @property
    def fits(self) -> bool:
        """Whether they fit in a device's memory."""
        return self.device_bytes <= room_bytes(self.slice)

    @property
    def room_for(self) -> int:
        """Sequences of that context that fit over all replicas."""
        free = room_bytes(self.slice) * self.tensor - self.model.weight_bytes(self.formats.weights)
        each = self.model.cache_bytes(self.traffic.context, self.formats.cache)
        return self.replicas * max(0, int(free // each))

    def decode(self) -> ServingPass:
        """Return the pass of one more token per sequence, which reads all weights and caches."""
        m, rows, context = self.model, self.sequences, self.traffic.mean_context
        reached = self._hbm * ServingRates.of(self.slice.chip.name).cache_share
        attention = [
            (
                FLOPS_PER_PRODUCT * kind.token_products(context) * rows / self._peak("bf16"),
                kind.bytes_attended(context, self.formats.cache) * rows / reached,
            )
            for kind in m.kinds
        ]
        joined = sum(
            kind.layers * self._sum_s(rows * kind.joined_width)
            for kind in m.kinds
            if self.tensor > kind.key_heads
        )
        return self._pass(rows, self.traffic.batch, attention, joined)

    def prefill(self) -> ServingPass:
        """Return the pass of one prompt per replica."""
        length = self.traffic.prompt
        attention = [
            (
                FLOPS_PER_PRODUCT
                * kind.prompt_products(length)
                / (self._machine.peak_flops("bf16") * self._attention_share(kind.layer.qk_dim)),
                kind.cache_bytes(length, self.formats.cache) / self._hbm,
            )
            for kind in self.model.kinds
        ]
        return self._pass(length, length * self.replicas, attention, 0.0)

    def throughput(self) -> ServingThroughput:
        """Throughput and latency."""
        return ServingThroughput(
            self.traffic, self.decode().seconds, self.prefill().seconds, self.sequences
        )

    def _pass(
        self, rows: int, tokens: int, attention: list[tuple[float, float]], joined: float
    ) -> ServingPass:
        """Return a pass over `rows` tokens of a replica, given the FLOPs and bytes of attention."""
        m = self.model
        parts = [*(kind.matrices for kind in m.kinds), m.outside]
        waits = [*attention, *(self._products(part, rows) for part in parts)]
        waits = [(flops / self.tensor, moved / self.tensor) for flops, moved in waits]
        each = StepRates.of().ops_per_layer * self._machine.op_overhead_s
        return ServingPass(
            tokens=tokens,
            flops=sum(flops for flops, moved in waits if flops >= moved),
            hbm=sum(moved for flops, moved in waits if flops < moved),
            network=2 * m.layers * self._sum_s(rows * m.d_model) + joined,
            starts=m.layers * each,
        )

    def _products(self, matrices: tuple[Matrices, ...], rows: int) -> tuple[float, float]:
        """Return the seconds of matmuls by FLOPs and by reading weights, on one device."""
        formats = self.formats
        multiplied = formats.multiplied(self.slice)
        flops = sum(
            FLOPS_PER_PRODUCT
            * one.products
            * rows
            / self._peak(multiplied if one.narrow else "bf16")
            for one in matrices
        )
        read = sum(one.bytes_read(formats.weights, rows) for one in matrices)
        return flops, read / self._hbm

    def _sum_s(self, numbers: int) -> float:
        """Return the seconds of all-reduces of activations along `tensor`."""
        machine, links = self._machine, self._links
        amount = BFLOAT16.nbytes(numbers)
        once = amount * links.share / (links.lanes * machine.ici_bytes_per_s)
        return 2 * (once + links.hops * machine.hop_latency_s)

    @property
    def _machine(self) -> Machine:
        return Machine.of(self.slice)

    @property
    def _links(self) -> Links:
        return place_axes(self.slice, {"tensor": self.tensor}).get("tensor", Links())

    def _peak(self, format: str) -> float:
        """Return the FLOP/s that matmuls of a format reach."""
        machine = self._machine
        share = machine.int8_over_bf16 if format == "int8" else 1.0
        return machine.peak_flops(format) * machine.matrix_efficiency * share

    def _attention_share(self, head_dim: int) -> float:
        return self._machine.attention_share(head_dim)

    @property
    def _hbm(self) -> float:
        """Return the HBM bytes per second of streaming ops, at most those of a measured copy."""
        machine, chip = self._machine, self.slice.chip
        alone = machine.hbm_bytes_per_s * machine.hbm_efficiency * machine.op_time_in_a_step
        copied = chip.measured.get("hbm_copy_gbps")
        if copied is None:
            return alone
        return min(alone, chip.per_device(copied).require("serving") * 1e9)


def room_bytes(on: Slice) -> float:
    """Return the bytes per device that weights and cache may use."""
    usable = on.chip.per_device(on.chip.hbm_usable_bytes).require("serving")
    return usable * (1 - MemoryRates.of().serving_headroom)


def servers_on(
    on: Slice, model: ServedModel, traffic: ServingTraffic, formats: ServedFormats
) -> Iterator[Server]:
    """Return every split of a slice into replicas that fits in memory."""
    devices = on.devices // on.num_slices
    powers = (2**power for power in range(devices.bit_length()))
    for tensor in sorted({*(size for size in powers if devices % size == 0), devices}):
        server = Server(model, on, traffic, tensor, formats)
        if server.fits:
            yield server

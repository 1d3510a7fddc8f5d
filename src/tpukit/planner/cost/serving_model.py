"""How long a served model takes for a token and for a prompt, by what each waits for.

A slice holds replicas of the model, each split over a `tensor` axis. Products wait for FLOPs or for
their weights, attention for FLOPs or for the cache, whichever takes longer; what devices exchange
and the start of ops come on top. A server's own work (scheduling, sampling, tokenizing) is not
counted; it runs beside the device in the servers that publish figures.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from ...compiler.timeline.machine import Machine
from ...hardware import Slice
from ...hardware.formats import BFLOAT16
from ...hardware.rates import MemoryRates, ServingRates, StepRates
from .matrices import Matrices
from .served_model import ServedModel
from .torus import Links, place_axes

ROOFS = ("flops", "hbm", "network", "starts")
FLOPS_PER_PRODUCT = 2


@dataclass(frozen=True, kw_only=True)
class ServedFormats:
    """Formats of weights, cache and activations, as `WEIGHT_FORMATS` and `CACHE_FORMATS` call them.

    Attributes:
        activations: What products round their rows to; only where weights have the same format and
            the chip multiplies it are they faster for that.
    """

    weights: str = "bf16"
    cache: str = "bf16"
    activations: str = "bf16"

    def multiplied(self, on: Slice) -> str:
        """The format in which a chip multiplies: narrow weights are widened to the activations'."""
        same = self.activations == self.weights and on.chip.multiplies(self.activations)
        return self.activations if same else "bf16"


@dataclass(frozen=True, kw_only=True)
class ServingTraffic:
    """What is asked of a server.

    Attributes:
        batch: Requests at once, over all replicas.
        prompt: Tokens that each comes with.
        new: Tokens that each is answered with.
    """

    batch: int
    prompt: int
    new: int

    @property
    def context(self) -> int:
        """Tokens that a sequence ends with."""
        return self.prompt + self.new

    @property
    def mean_context(self) -> int:
        """Tokens that a sequence has when a token is added, in the mean over its answer."""
        return self.prompt + math.ceil(self.new / 2)


@dataclass(frozen=True, kw_only=True)
class ServingPass:
    """Seconds of one pass of a replica over some tokens, by what they wait for (origin: model).

    Attributes:
        tokens: Of all replicas together.
        flops: Seconds that products and attention wait for the matrix unit.
        hbm: Seconds that they wait for weights and cache.
        network: Seconds of sums between the devices of a replica.
        starts: Seconds in which ops are started.
    """

    tokens: int
    flops: float
    hbm: float
    network: float
    starts: float

    @property
    def seconds(self) -> float:
        """The whole pass."""
        return self.flops + self.hbm + self.network + self.starts

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of all replicas, were there no other pass."""
        return self.tokens / self.seconds

    @property
    def bound_by(self) -> str:
        """What most of it waits for."""
        return max(ROOFS, key=lambda roof: getattr(self, roof))


@dataclass(frozen=True)
class ServingThroughput:
    """What clients see of a server that is kept busy: a new request comes when one is answered.

    Every replica reads the prompts of its requests one after the other, and no token is added
    meanwhile: in the time of one answer it reads as many prompts as it has sequences.

    Attributes:
        decode_s: Of a step that adds a token to every sequence.
        prefill_s: Of one prompt.
        sequences: Of a replica.
    """

    traffic: ServingTraffic
    decode_s: float
    prefill_s: float
    sequences: int

    @property
    def token_s(self) -> float:
        """Between two tokens of an answer, in the mean: time per output token."""
        return self.decode_s + self.sequences * self.prefill_s / self.traffic.new

    @property
    def tokens_per_s(self) -> float:
        """New tokens of all requests."""
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
        """Weights and cache on one device."""
        held = self.model.cache_bytes(self.traffic.context, self.formats.cache)
        whole = self.model.weight_bytes(self.formats.weights) + held * self.sequences
        return whole / self.tensor

    @property
    def fits(self) -> bool:
        """Whether a device has room for them."""
        return self.device_bytes <= room_bytes(self.slice)

    @property
    def room_for(self) -> int:
        """Sequences of that context that all replicas have room for."""
        free = room_bytes(self.slice) * self.tensor - self.model.weight_bytes(self.formats.weights)
        each = self.model.cache_bytes(self.traffic.context, self.formats.cache)
        return self.replicas * max(0, int(free // each))

    def decode(self) -> ServingPass:
        """One more token for every sequence: all weights and each sequence's cache are read."""
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
        """A prompt in every replica."""
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
        """What clients see."""
        return ServingThroughput(
            self.traffic, self.decode().seconds, self.prefill().seconds, self.sequences
        )

    def _pass(
        self, rows: int, tokens: int, attention: list[tuple[float, float]], joined: float
    ) -> ServingPass:
        """Of `rows` tokens of a replica, whose attention waits for FLOPs or for bytes."""
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
        """Seconds of their FLOPs and of reading them, on one device."""
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
        """Seconds to add up activations along `tensor`."""
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
        """FLOP/s that products of a format reach."""
        machine = self._machine
        share = machine.int8_over_bf16 if format == "int8" else 1.0
        return machine.peak_flops(format) * machine.matrix_efficiency * share

    def _attention_share(self, head_dim: int) -> float:
        return self._machine.attention_share(head_dim)

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
    on: Slice, model: ServedModel, traffic: ServingTraffic, formats: ServedFormats
) -> Iterator[Server]:
    """Every split of a slice into replicas that a device has room for."""
    devices = on.devices // on.num_slices
    powers = (2**power for power in range(devices.bit_length()))
    for tensor in sorted({*(size for size in powers if devices % size == 0), devices}):
        server = Server(model, on, traffic, tensor, formats)
        if server.fits:
            yield server

"""How small a slice can serve a model: weights and KV cache in HBM, speed by the roofs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from ..errors import TPUValidationError, did_you_mean
from ..hardware import Figure, Slice, get_chip, list_chips, list_slices
from ..hardware.formats import spelled_as
from ..hardware.stored_formats import WEIGHT_FORMATS
from ..runtime.ranges import Range
from .cost.model_shape import ModelShape
from .cost.serving_model import Pass, Server, cache_bytes, room_bytes, servers_on, weight_bytes
from .search.candidates import named_slice, refuse_unknown_rates, unknown_rate
from .sizing.memory_optimizer import transformer_shape

USUAL_FORMATS = ("bf16", "int8", "int4", "vq")  # fp8 takes as much as int8
MOST_SEQUENCES = 2**20
SOURCE = "roofs of FLOPs, HBM and links (planner/cost/serving_model.py)"
CAPTION = (
    "At most, by roofs: a decode step reads every weight once for all sequences of a replica, each "
    "sequence's cache once,\nmultiplies in bfloat16 and sums activations along tensor twice a "
    "layer; a prompt is read alone on its replica."
)


@dataclass(frozen=True, kw_only=True)
class ServingChoice:
    """The smallest slice of one generation for one weight format, or why there is none.

    Attributes:
        tensor: Devices that hold one copy of the weights together.
        replicas: Such copies.
        decode: A step that adds a token to every sequence.
        prefill: A pass over a prompt of the whole context in every replica.
    """

    generation: str
    weights: str
    slice: str | None
    chips: int | None
    weight_bytes: float
    cache_bytes: float
    tensor: int | None = None
    replicas: int | None = None
    decode: Pass | None = None
    prefill: Pass | None = None
    reason: str = ""

    @property
    def decoded(self) -> Figure:
        """Tokens a second of all sequences together, at most."""
        return self._rate(self.decode)

    @property
    def prefilled(self) -> Figure:
        """Tokens of prompts a second, all replicas at it, at most."""
        return self._rate(self.prefill)

    @property
    def tokens_per_s(self) -> float | None:
        """`decoded` as a number."""
        return self.decoded.value

    def _rate(self, one: Pass | None) -> Figure:
        if one is None:
            return Figure.missing("tokens/s", self.reason)
        seconds = Figure(one.seconds, "s", "model", SOURCE)
        return Figure.derived(one.tokens_per_s, "tokens/s", inputs=(seconds,))

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "generation": self.generation,
            "weights": self.weights,
            "slice": self.slice,
            "chips": self.chips,
            "tensor": self.tensor,
            "replicas": self.replicas,
            "weight_bytes": self.weight_bytes,
            "cache_bytes": self.cache_bytes,
            "tokens_per_s": self.tokens_per_s,
            "origin": self.decoded.origin,
            "decode": None if self.decode is None else vars(self.decode),
            "prefill_tokens_per_s": self.prefilled.value,
            "prefill": None if self.prefill is None else vars(self.prefill),
            "reason": self.reason,
        }


@dataclass(frozen=True)
class ServingPlan:
    """A choice for every generation and weight format."""

    model: str
    batch: int
    context: int
    choices: tuple[ServingChoice, ...]

    @property
    def smallest(self) -> ServingChoice | None:
        """The choice with the fewest chips; among equals the fastest."""
        found = [one for one in self.choices if one.chips is not None]
        return min(found, key=lambda c: (c.chips or 0, -(c.tokens_per_s or 0)), default=None)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "model": self.model,
            "batch": self.batch,
            "context": self.context,
            "choices": [one.to_dict() for one in self.choices],
        }

    def __rich__(self) -> Table:
        sequences = "1 sequence" if self.batch == 1 else f"{self.batch:,} sequences"
        title = f"serving {self.model}: {sequences} of {self.context:,} tokens"
        table = Table("weights", "slice", "how", "GiB weights", "GiB cache")
        for heading in ("decode tokens/s (model)", "bound by", "prefill tokens/s (model)"):
            table.add_column(heading)
        table.title, table.caption = title, CAPTION
        for one in self.choices:
            sizes = (f"{amount / 2**30:.1f}" for amount in (one.weight_bytes, one.cache_bytes))
            where = one.slice or f"{one.generation}: {one.reason}"
            how = "" if one.tensor is None else f"{one.replicas} x tensor={one.tensor}"
            rates = ("–", "", "–")
            if one.decode is not None and one.prefill is not None:
                decoded, prefilled = (f"{p.tokens_per_s:,.0f}" for p in (one.decode, one.prefill))
                rates = (decoded, one.decode.bound_by, prefilled)
            table.add_row(one.weights, where, how, *sizes, *rates)
        return table


def plan_serving(
    model: object,
    *,
    batch: int = 1,
    context: int = 8192,
    formats: Sequence[str] = USUAL_FORMATS,
    generations: Sequence[str] | None = None,
) -> ServingPlan:
    """The smallest slice of each generation that holds the weights and the cache.

    Args:
        model: A preset's name, a config.json, a `TransformerConfig`, or a `Workload` of one.
        batch: Sequences served at once.
        context: Tokens each of them may hold.
        formats: Of the weights: bf16, int8, fp8, int4, vq.
        generations: Chips, or slices such as "v6e-8", to consider; all chips with public slices
            and rates by default.

    Raises:
        TPUValidationError: A format or a size is wrong.
    """
    formats = [_weight_format(name) for name in formats]
    shape = transformer_shape(model)
    Range(1, MOST_SEQUENCES).check_whole("batch", batch, unit="sequences")
    Range(1, shape.max_seq_len).check_whole("context", context, unit=f"tokens of {shape.name}")
    if generations is None:
        generations = [c.name for c in list_chips() if c.rules and not unknown_rate(c)]
    for name in generations:
        one = named_slice(name)
        refuse_unknown_rates(get_chip(name) if one is None else one.chip)
    choices = [
        _choose(shape, generation, weights, batch, context)
        for generation in generations
        for weights in formats
    ]
    return ServingPlan(shape.name, batch, context, tuple(choices))


def _weight_format(name: str) -> str:
    found = spelled_as(name, WEIGHT_FORMATS)
    if found is None:
        raise TPUValidationError(
            f"'{name}' is no weight format; use {', '.join(WEIGHT_FORMATS)}."
            + did_you_mean(name, WEIGHT_FORMATS)
        )
    return found


def _chips(on: Slice) -> int:
    return on.chips


def _decoded(server: Server) -> float:
    return server.decode().tokens_per_s


def _choose(
    shape: ModelShape, generation: str, weights: str, batch: int, context: int
) -> ServingChoice:
    held, cache = weight_bytes(shape, weights), cache_bytes(shape, batch, context)
    one = named_slice(generation)
    slices = sorted(list_slices(generation) if one is None else [one], key=_chips)
    common: dict[str, Any] = {
        "generation": generation,
        "weights": weights,
        "weight_bytes": held,
        "cache_bytes": cache,
    }
    for on in slices:
        servers = servers_on(on, shape, weights=weights, batch=batch, context=context)
        best = max(servers, key=_decoded, default=None)
        if best is not None:
            return ServingChoice(
                **common,
                slice=str(on),
                chips=on.chips,
                tensor=best.tensor,
                replicas=best.replicas,
                decode=best.decode(),
                prefill=best.prefill(),
            )
    largest = max(room_bytes(on) * on.devices for on in slices)
    has = "its largest slice has" if one is None else "it has"
    needed = f"needs {(held + cache) / 2**30:,.0f} GiB"
    reason = f"{needed}, {has} room for {largest / 2**30:,.0f}"
    return ServingChoice(**common, slice=None, chips=None, reason=reason)

"""How small a slice can serve a model: weights and KV cache in HBM, decode by the HBM roofline."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from ..compiler.timeline.machine import Machine
from ..errors import TPUValidationError, did_you_mean
from ..hardware import Slice, get_chip, list_chips, list_slices
from ..hardware.formats import BFLOAT16, spelled_as
from ..hardware.rates import MemoryRates
from ..hardware.stored_formats import WEIGHT_FORMATS
from .cost.model_shape import ModelShape
from .search.candidates import named_slice, refuse_unknown_rates, unknown_rate
from .sizing.memory_optimizer import transformer_shape

USUAL_FORMATS = ("bf16", "int8", "int4", "vq")  # fp8 takes as much as int8


@dataclass(frozen=True, kw_only=True)
class ServingChoice:
    """The smallest slice of one generation for one weight format, or why there is none.

    `tokens_per_s` counts all sequences of the batch: what HBM allows when each step reads every
    weight and the whole cache once. Communication and arithmetic are not in it.
    """

    generation: str
    weights: str
    slice: str | None
    chips: int | None
    weight_bytes: float
    cache_bytes: float
    tokens_per_s: float | None
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "generation": self.generation,
            "weights": self.weights,
            "slice": self.slice,
            "chips": self.chips,
            "weight_bytes": self.weight_bytes,
            "cache_bytes": self.cache_bytes,
            "tokens_per_s": self.tokens_per_s,
            "origin": "model",
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
        table = Table("weights", "slice", "GiB weights", "GiB cache", "tokens/s (model)")
        table.title = title
        table.caption = "HBM roofline: every weight and the whole cache read once a token"
        for one in self.choices:
            rate = "–" if one.tokens_per_s is None else f"{one.tokens_per_s:,.0f}"
            where = one.slice or f"{one.generation}: {one.reason}"
            sizes = (f"{amount / 2**30:.1f}" for amount in (one.weight_bytes, one.cache_bytes))
            table.add_row(one.weights, where, *sizes, rate)
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
    if batch < 1 or context < 1:
        raise TPUValidationError(f"batch={batch} and context={context} must both be 1 or more.")
    shape = transformer_shape(model)
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


@dataclass(frozen=True)
class Matrices:
    """Weights of one kind: `count` matrices that rows of width `rows` are multiplied with."""

    rows: int
    columns: int
    count: int
    of_experts: bool = False

    @property
    def parameters(self) -> int:
        """Of all of them."""
        return self.rows * self.columns * self.count

    def nbytes(self, weights: str) -> int:
        """Of all of them in a weight format."""
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


def cache_bytes(shape: ModelShape, batch: int, context: int) -> float:
    """Bytes of keys and values of all layers; a local one holds no more than its window."""
    local = shape.layers - shape.global_layers
    held = shape.global_layers * context + local * min(context, shape.window or context)
    return float(BFLOAT16.nbytes(2 * shape.kv_heads * shape.head_dim * held * batch))


def read_bytes(shape: ModelShape, weights: str, batch: int, context: int) -> float:
    """Bytes one decode step reads: of an MoE only the experts that the batch chooses."""
    whole = weight_bytes(shape, weights) + cache_bytes(shape, batch, context)
    if not shape.experts:
        return whole
    untouched = (1 - shape.experts_per_token / shape.experts) ** batch
    experts = sum(one.nbytes(weights) for one in layer_matrices(shape) if one.of_experts)
    return whole - experts * untouched


def _chips(on: Slice) -> int:
    return on.chips


def _choose(
    shape: ModelShape, generation: str, weights: str, batch: int, context: int
) -> ServingChoice:
    held, cache = weight_bytes(shape, weights), cache_bytes(shape, batch, context)
    headroom = MemoryRates.of().serving_headroom
    found: Slice | None = None
    largest = 0.0
    one = named_slice(generation)
    for on in sorted(list_slices(generation) if one is None else [one], key=_chips):
        usable = on.chip.hbm_usable_bytes
        if usable.value is None:
            break
        room = usable.value * on.chips * (1 - headroom)
        largest = max(largest, room)
        if held + cache <= room:
            found = on
            break
    if found is None:
        needed = f"needs {(held + cache) / 2**30:,.0f} GiB"
        has = "its largest slice has" if one is None else "it has"
        reason = f"{needed}, {has} room for {largest / 2**30:,.0f}"
        return ServingChoice(
            generation=generation,
            weights=weights,
            slice=None,
            chips=None,
            weight_bytes=held,
            cache_bytes=cache,
            tokens_per_s=None,
            reason=reason,
        )
    machine = Machine.of(found)
    each = read_bytes(shape, weights, batch, context) / found.devices
    return ServingChoice(
        generation=generation,
        weights=weights,
        slice=str(found),
        chips=found.chips,
        weight_bytes=held,
        cache_bytes=cache,
        tokens_per_s=batch / machine.hbm_s(each),
    )

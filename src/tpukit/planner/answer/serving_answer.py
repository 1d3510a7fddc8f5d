"""`ServingPlan`: a slice for each generation and weight format, with its speed; as text too."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Group
from rich.table import Table
from rich.text import Text

from ...hardware import Figure
from ...plain_data import JsonObject
from ...runtime.files import write_output
from ...shown import Facts, Shown
from ..cost.serving_model import ServedFormats, ServingPass, ServingThroughput, ServingTraffic

if TYPE_CHECKING:
    from rich.console import Group


SOURCE = "roofs of FLOPs, HBM and links (planner/cost/serving_model.py)"
COMPILED_SOURCE = "timelines of the compiled programs of generation"
MILLION, HOUR = 1e6, 3600


@dataclass(frozen=True, kw_only=True)
class CompiledServing:
    """The compiler's result for the programs of `generate`, or the reason why there is none.

    Attributes:
        decode_s: Seconds of one iteration of the decode loop, predicted from its schedule; all
            cache slots are read.
        prefill_s: Seconds of one prompt per replica.
        device_bytes: Most HBM per device while decoding.
        prompt: Tokens of the compiled prompt, a power of two.
        context: Slots of the compiled cache, a power of two.
    """

    fits: bool | None = None
    decode_s: float | None = None
    prefill_s: float | None = None
    device_bytes: int | None = None
    prompt: int | None = None
    context: int | None = None
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class ServingChoice(Facts):
    """The smallest slice of one generation for one weight format, or why there is none.

    Attributes:
        multiplied: Number format of the matmuls.
        tensor: Devices per copy of the weights.
        replicas: Copies of the weights.
        room_for: Sequences of that context that fit in the slice's memory.
        decode: A step that adds one token to every sequence, at their mean length.
        prefill: A pass over one prompt per replica.
        modelled: Throughput and latency, from the model.
        device_bytes: Bytes of weights and cache per device, of at most `room_bytes`.
        usd_per_chip_hour: Price in `region`; missing if unknown.
        compiled: The compiler's result; None if it was not requested.
    """

    generation: str
    formats: ServedFormats
    slice: str | None
    chips: int | None
    weight_bytes: float
    cache_bytes: float
    multiplied: str | None = None
    tensor: int | None = None
    replicas: int | None = None
    room_for: int | None = None
    decode: ServingPass | None = None
    prefill: ServingPass | None = None
    modelled: ServingThroughput | None = None
    device_bytes: float | None = None
    room_bytes: float | None = None
    usd_per_chip_hour: Figure | None = None
    region: str | None = None
    compiled: CompiledServing | None = None
    reason: str = ""
    _facts = (
        "generation **formats multiplied slice chips tensor replicas room_for weight_bytes "
        "cache_bytes tokens_per_s tokens_per_s_per_chip token_s=token_time.value "
        "first_token_s=first_token_time.value usd_per_million_tokens=usd_per_million region "
        "origin=served.origin source=served.source compiled decode prefill reason"
    )

    @property
    def weights(self) -> str:
        """Format of the weights."""
        return self.formats.weights

    @property
    def throughput(self) -> ServingThroughput | None:
        """Throughput and latency, from compiled programs if there are any."""
        c = self.compiled
        if self.modelled is None or c is None or c.decode_s is None or c.prefill_s is None:
            return self.modelled
        return replace(self.modelled, decode_s=c.decode_s, prefill_s=c.prefill_s)

    @property
    def is_compiled(self) -> bool:
        """Whether the speeds come from compiled programs."""
        return self.throughput is not self.modelled

    @property
    def served(self) -> Figure:
        """New tokens per second over all requests."""
        t = self.throughput
        return self._figure(None if t is None else t.tokens_per_s, "tokens/s")

    @property
    def token_time(self) -> Figure:
        """Seconds between two tokens of an answer, with the prefills of other requests."""
        t = self.throughput
        return self._figure(None if t is None else t.token_s, "s")

    @property
    def first_token_time(self) -> Figure:
        """Seconds until the first token of a request that does not queue."""
        t = self.throughput
        return self._figure(None if t is None else t.prefill_s, "s")

    @property
    def usd_per_million(self) -> Figure:
        """Dollars per million new tokens of a busy server, with prefill included."""
        unit = "USD/M tokens"
        if self.usd_per_chip_hour is None or self.chips is None:
            return Figure.missing(unit, self.reason)
        hourly = self.usd_per_chip_hour * self.chips
        return (hourly / self.served).scaled(MILLION / HOUR, unit=unit)

    @property
    def tokens_per_s(self) -> float | None:
        """`served` as a number."""
        return self.served.value

    @property
    def tokens_per_s_per_chip(self) -> float | None:
        """`tokens_per_s` per chip."""
        served = self.tokens_per_s
        return None if served is None or self.chips is None else served / self.chips

    def _figure(self, value: float | None, unit: str) -> Figure:
        if value is None:
            return Figure.missing(unit, self.reason)
        return Figure(value, unit, "model", COMPILED_SOURCE if self.is_compiled else SOURCE)


@dataclass(frozen=True)
class ServingPlan(Shown):
    """A choice for every generation and weight format, at prices of one tier."""

    model: str
    traffic: ServingTraffic
    cache: str
    tier: str
    choices: tuple[ServingChoice, ...]
    _facts = (
        "model batch=traffic.batch context=traffic.context prompt_tokens=traffic.prompt "
        "new_tokens=traffic.new cache tier choices"
    )

    @property
    def smallest(self) -> ServingChoice | None:
        """The choice with the fewest chips; among equals the fastest."""
        found = [one for one in self.choices if one.chips is not None]
        return min(found, key=lambda c: (c.chips or 0, -(c.tokens_per_s or 0)), default=None)

    @property
    def cheapest(self) -> dict[str, ServingChoice]:
        """The choice with the lowest price per token, by weight format.

        Formats are not compared with each other, because fewer bits cost less but lose accuracy.
        """
        found: dict[str, ServingChoice] = {}
        for one in self.choices:
            best = found.get(one.weights)
            usd = one.usd_per_million.value
            if usd is not None and (best is None or usd < (best.usd_per_million.value or 0.0)):
                found[one.weights] = one
        return found

    def to_dict(self) -> JsonObject:
        """Return the plan as plain data."""
        return {
            **super().to_dict(),
            "cheapest": {weights: one.slice for weights, one in self.cheapest.items()},
        }

    def to_html(self, path: Path | str) -> None:
        """Write the plan as one self-contained HTML page."""
        from .serving_page import render_serving_page

        write_output(Path(path), render_serving_page(self))

    def __rich__(self) -> "Group":

        return serving_report(self)


MILLISECOND = 1e-3
ASSUMED = (
    "A decode step reads every weight once for all sequences of a replica and each sequence's "
    "cache once, sums activations along tensor twice a layer and starts its ops; a replica reads "
    "prompts one after the other."
)
HEADINGS = (
    *("weights", "slice", "split", "GiB\n+ cache", "tokens\n/s", "a\nchip"),
    *("ms a\ntoken", "bound\nby", "ms to\nfirst", "$ per M\ntokens"),
)


def serving_report(plan: ServingPlan) -> Group:
    """Return the whole answer."""
    caption = f"origin: model. split: replicas x tensor. {ASSUMED} {price_words(plan)}"
    table = Table(box=SIMPLE_HEAD, padding=0, show_edge=False, caption=caption)
    for heading in HEADINGS:
        table.add_column(heading, no_wrap=True)
    for one in plan.choices:
        table.add_row(*_cells(one))
    return Group(
        Text(f"serving {plan.model}: {traffic_words(plan)}", style="bold"),
        *(Text(cheapest_words(one)) for one in plan.cheapest.values()),
        "",
        table,
        *(Text(line) for line in remarks(plan)),
    )


def traffic_words(plan: ServingPlan) -> str:
    """Return a line on the traffic."""
    t = plan.traffic
    at_once = "1 request" if t.batch == 1 else f"{t.batch:,} requests at once"
    return f"{at_once} of {t.prompt:,} + {t.new:,} tokens, cache in {plan.cache}"


def cheapest_words(one: ServingChoice) -> str:
    """Return a line on the cheapest choice of a format, its price and its speed."""
    return (
        f"{one.weights}: cheapest on {one.slice}, {money_text(one)} a million new tokens, "
        f"{one.tokens_per_s:,.0f}/s, {milliseconds(one.token_time.value)} ms each"
    )


def price_words(plan: ServingPlan) -> str:
    """Return a line on the tier and source of prices."""
    priced = [one.usd_per_chip_hour for one in plan.choices if one.usd_per_chip_hour is not None]
    known = next((price for price in priced if price.value is not None), None)
    if known is None:
        return f"No {plan.tier} price is known of these slices."
    dated = f", {known.date}" if known.date else ""
    return (
        f"$: a server kept busy, {plan.tier} prices in the cheapest region allowed "
        f"({known.source}{dated}), the reading of prompts counted with the new tokens."
    )


def remarks(plan: ServingPlan) -> list[str]:
    """Return notes: why there is no slice or price, and the compiler's result."""
    said: list[str] = []
    for one in plan.choices:
        if one.slice is None:
            said.append(f"{one.weights} on {one.generation}: {one.reason}")
        if one.compiled is not None and one.modelled is not None:
            by_roofs = f"{milliseconds(one.modelled.token_s)} ms a token by roofs"
            how = "compiled" if one.is_compiled else "not compiled"
            said.append(f"{one.weights} on {one.slice}, {how}: {one.compiled.reason or by_roofs}")
        if one.slice is not None and one.usd_per_million.value is None:
            said.append(f"no price of {one.usd_per_million.reason}")
    return list(dict.fromkeys(said))


def money_text(one: ServingChoice) -> str:
    """Return dollars per million new tokens, or "–"."""
    usd = one.usd_per_million.value
    return "–" if usd is None else f"${usd:,.2f}"


def split_text(one: ServingChoice) -> str:
    """Return replicas and devices per replica."""
    return "" if one.tensor is None else f"{one.replicas} x {one.tensor}"


def milliseconds(seconds: float | None) -> str:
    """Return seconds as milliseconds, or "–"."""
    return "–" if seconds is None else f"{seconds / MILLISECOND:,.1f}"


def _cells(one: ServingChoice) -> tuple[str, ...]:
    sizes = f"{_gib(one.weight_bytes)} + {_gib(one.cache_bytes)}"
    where = (one.weights, one.slice or f"no {one.generation}", split_text(one), sizes)
    if one.decode is None:
        return (*where, "–", "", "", "", "–", "–")
    return (
        *where,
        f"{one.tokens_per_s:,.0f}",
        f"{one.tokens_per_s_per_chip:,.0f}",
        milliseconds(one.token_time.value),
        one.decode.bound_by,
        milliseconds(one.first_token_time.value),
        money_text(one).removeprefix("$"),
    )


def _gib(amount: float) -> str:
    gib = amount / 2**30
    return f"{gib:,.0f}" if gib >= 10 else f"{gib:.1f}"

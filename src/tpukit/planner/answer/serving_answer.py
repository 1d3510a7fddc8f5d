"""What `plan_serving` answers: a slice for every generation and weight format, and its speed."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...hardware import Figure
from ...runtime.files import write_output
from ...shown import Shown
from ..cost.serving_model import ServedFormats, ServingPass, ServingThroughput, ServingTraffic

if TYPE_CHECKING:
    from rich.console import Group

SOURCE = "roofs of FLOPs, HBM and links (planner/cost/serving_model.py)"
COMPILED_SOURCE = "timelines of the compiled programs of generation"
MILLION, HOUR = 1e6, 3600


@dataclass(frozen=True, kw_only=True)
class CompiledServing:
    """What the compiler says of the programs that `generate` runs, or why it was not asked.

    Attributes:
        decode_s: Of one turn of the loop that adds tokens, by its timeline; it reads all slots.
        prefill_s: Of one prompt in every replica.
        device_bytes: The most that decoding holds on a device.
        prompt: Tokens of the prompt compiled, a power of two.
        context: Slots of the cache compiled, a power of two.
    """

    fits: bool | None = None
    decode_s: float | None = None
    prefill_s: float | None = None
    device_bytes: int | None = None
    prompt: int | None = None
    context: int | None = None
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class ServingChoice:
    """The smallest slice of one generation for one weight format, or why there is none.

    Attributes:
        multiplied: The format in which products are made.
        tensor: Devices that hold one copy of the weights together.
        replicas: Such copies.
        room_for: Sequences of that context that the slice has room for.
        decode: A step that adds a token to every sequence, at the mean length of their answers.
        prefill: A pass over one prompt in every replica.
        modelled: What clients see of both.
        device_bytes: Weights and cache on one device, of `room_bytes` that they may take.
        usd_per_chip_hour: In `region`; missing where no price is known.
        compiled: What the compiler says of the choice; None where it was not to be asked.
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

    @property
    def weights(self) -> str:
        """Their format."""
        return self.formats.weights

    @property
    def throughput(self) -> ServingThroughput | None:
        """What clients see: by the compiled programs where their time is known."""
        c = self.compiled
        if self.modelled is None or c is None or c.decode_s is None or c.prefill_s is None:
            return self.modelled
        return replace(self.modelled, decode_s=c.decode_s, prefill_s=c.prefill_s)

    @property
    def is_compiled(self) -> bool:
        """Whether speeds are those of compiled programs."""
        return self.throughput is not self.modelled

    @property
    def served(self) -> Figure:
        """New tokens a second of all requests together."""
        t = self.throughput
        return self._figure(None if t is None else t.tokens_per_s, "tokens/s")

    @property
    def token_time(self) -> Figure:
        """Seconds between two tokens of an answer, prompts of others among them."""
        t = self.throughput
        return self._figure(None if t is None else t.token_s, "s")

    @property
    def first_token_time(self) -> Figure:
        """Seconds until a request that waits for no other has its first token."""
        t = self.throughput
        return self._figure(None if t is None else t.prefill_s, "s")

    @property
    def usd_per_million(self) -> Figure:
        """Dollars for a million new tokens of a server kept busy, prompts read among them."""
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
        """The same of one chip."""
        served = self.tokens_per_s
        return None if served is None or self.chips is None else served / self.chips

    def _figure(self, value: float | None, unit: str) -> Figure:
        if value is None:
            return Figure.missing(unit, self.reason)
        return Figure(value, unit, "model", COMPILED_SOURCE if self.is_compiled else SOURCE)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "generation": self.generation,
            **vars(self.formats),
            "multiplied": self.multiplied,
            "slice": self.slice,
            "chips": self.chips,
            "tensor": self.tensor,
            "replicas": self.replicas,
            "room_for": self.room_for,
            "weight_bytes": self.weight_bytes,
            "cache_bytes": self.cache_bytes,
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_per_chip": self.tokens_per_s_per_chip,
            "token_s": self.token_time.value,
            "first_token_s": self.first_token_time.value,
            "usd_per_million_tokens": self.usd_per_million.to_dict(),
            "region": self.region,
            "origin": self.served.origin,
            "source": self.served.source,
            "compiled": None if self.compiled is None else vars(self.compiled),
            "decode": None if self.decode is None else vars(self.decode),
            "prefill": None if self.prefill is None else vars(self.prefill),
            "reason": self.reason,
        }


@dataclass(frozen=True)
class ServingPlan(Shown):
    """A choice for every generation and weight format, at prices of one tier."""

    model: str
    traffic: ServingTraffic
    cache: str
    tier: str
    choices: tuple[ServingChoice, ...]

    @property
    def smallest(self) -> ServingChoice | None:
        """The choice with the fewest chips; among equals the fastest."""
        found = [one for one in self.choices if one.chips is not None]
        return min(found, key=lambda c: (c.chips or 0, -(c.tokens_per_s or 0)), default=None)

    @property
    def cheapest(self) -> dict[str, ServingChoice]:
        """By weight format, what a token costs least on; formats no priced slice holds are absent.

        Formats are not compared with each other: fewer bits cost less and lose more.
        """
        found: dict[str, ServingChoice] = {}
        for one in self.choices:
            best = found.get(one.weights)
            usd = one.usd_per_million.value
            if usd is not None and (best is None or usd < (best.usd_per_million.value or 0.0)):
                found[one.weights] = one
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "model": self.model,
            "batch": self.traffic.batch,
            "context": self.traffic.context,
            "prompt_tokens": self.traffic.prompt,
            "new_tokens": self.traffic.new,
            "cache": self.cache,
            "tier": self.tier,
            "choices": [one.to_dict() for one in self.choices],
            "cheapest": {weights: one.slice for weights, one in self.cheapest.items()},
        }

    def to_html(self, path: Path | str) -> None:
        """Write the answer as one page that needs nothing else."""
        from .serving_page import render_serving_page

        write_output(Path(path), render_serving_page(self))

    def __rich__(self) -> "Group":
        from .serving_report import serving_report

        return serving_report(self)

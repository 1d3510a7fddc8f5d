"""What `plan_serving` answers: a slice for every generation and weight format, and its speed."""

from dataclasses import dataclass, replace
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from ...hardware import Figure
from ..cost.serving_model import Pass, ServedFormats, Throughput, Traffic

SOURCE = "roofs of FLOPs, HBM and links (planner/cost/serving_model.py)"
COMPILED_SOURCE = "timelines of the compiled programs of generation"
CAPTION = (
    "origin: model. split: replicas x tensor. A decode step reads every weight once for all "
    "sequences of a replica and each sequence's cache once, sums activations along tensor twice a "
    "layer and starts its ops; a replica reads prompts one after the other."
)
HEADINGS = (
    *("weights", "slice", "split", "GiB\n+ cache", "tokens\n/s", "a\nchip"),
    *("ms a\ntoken", "bound\nby", "ms to\nfirst"),
)
MILLISECOND = 1e-3


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
    decode: Pass | None = None
    prefill: Pass | None = None
    modelled: Throughput | None = None
    compiled: CompiledServing | None = None
    reason: str = ""

    @property
    def weights(self) -> str:
        """Their format."""
        return self.formats.weights

    @property
    def throughput(self) -> Throughput | None:
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
    def modelled_ms(self) -> float | None:
        """Milliseconds between two tokens by roofs, whatever the compiler says."""
        return None if self.modelled is None else self.modelled.token_s / MILLISECOND

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
            "origin": self.served.origin,
            "source": self.served.source,
            "compiled": None if self.compiled is None else vars(self.compiled),
            "decode": None if self.decode is None else vars(self.decode),
            "prefill": None if self.prefill is None else vars(self.prefill),
            "reason": self.reason,
        }


@dataclass(frozen=True)
class ServingPlan:
    """A choice for every generation and weight format."""

    model: str
    traffic: Traffic
    cache: str
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
            "batch": self.traffic.batch,
            "context": self.traffic.context,
            "prompt_tokens": self.traffic.prompt,
            "new_tokens": self.traffic.new,
            "cache": self.cache,
            "choices": [one.to_dict() for one in self.choices],
        }

    def __rich__(self) -> Table:
        t = self.traffic
        at_once = "1 request" if t.batch == 1 else f"{t.batch:,} requests at once"
        title = (
            f"serving {self.model}: {at_once} of {t.prompt:,} + {t.new:,} tokens, "
            f"cache in {self.cache}"
        )
        table = Table(title=title, box=SIMPLE_HEAD, padding=0, show_edge=False)
        for heading in HEADINGS:
            table.add_column(heading, no_wrap=True)
        reasons: list[str] = []
        for one in self.choices:
            if one.slice is None:
                reasons.append(f"{one.weights} on {one.generation}: {one.reason}")
            if one.compiled is not None:
                said = one.compiled.reason or f"{one.modelled_ms:,.1f} ms a token by roofs"
                how = "compiled" if one.is_compiled else "not compiled"
                reasons.append(f"{one.weights} on {one.slice}, {how}: {said}")
            sizes = f"{_gib(one.weight_bytes)} + {_gib(one.cache_bytes)}"
            where = one.slice or f"no {one.generation}"
            split = "" if one.tensor is None else f"{one.replicas} x {one.tensor}"
            table.add_row(one.weights, where, split, sizes, *_speeds(one))
        table.caption = "\n".join([*reasons, CAPTION])
        return table


def _gib(amount: float) -> str:
    gib = amount / 2**30
    return f"{gib:,.0f}" if gib >= 10 else f"{gib:.1f}"


def _speeds(one: ServingChoice) -> tuple[str, ...]:
    if one.throughput is None or one.decode is None:
        return ("–", "", "", "", "–")
    times = one.throughput
    return (
        f"{times.tokens_per_s:,.0f}",
        f"{one.tokens_per_s_per_chip:,.0f}",
        f"{times.token_s / MILLISECOND:,.1f}",
        one.decode.bound_by,
        f"{times.prefill_s / MILLISECOND:,.1f}",
    )

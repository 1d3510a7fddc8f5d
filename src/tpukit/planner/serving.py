"""How small a slice can serve a model: weights and cache in HBM, speed by the roofs."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError, TPUValidationError, did_you_mean
from ..hardware import Slice, get_chip, list_chips, list_slices
from ..hardware.cache_formats import parse_cache_format
from ..hardware.formats import spelled_as
from ..hardware.stored_formats import WEIGHT_FORMATS
from ..runtime.progress import Progress, silent
from ..runtime.ranges import COUNT, Range
from .answer.serving_answer import ServingChoice, ServingPlan
from .cost.money import Market
from .cost.served_model import ServedModel
from .cost.serving_model import ServedFormats, Server, ServingTraffic, room_bytes, servers_on
from .search.candidates import (
    named_slice,
    refuse_too_many_chips,
    refuse_unknown_rates,
    unknown_rate,
)
from .serving_verification import verify_servers
from .sizing.memory_optimizer import transformer_config

USUAL_FORMATS = ("bf16", "int8", "int4", "vq")  # fp8 takes as much as int8
USUAL_CONTEXT = 8192
ACTIVATION_FORMATS = ("bf16", "int8", "fp8")
MOST_SEQUENCES = 2**20


def plan_serving(
    model: object,
    *,
    batch: int = 1,
    context: int | None = None,
    prompt_tokens: int | None = None,
    new_tokens: int | None = None,
    formats: Sequence[str] = USUAL_FORMATS,
    cache: str = "bf16",
    activations: str = "bf16",
    generations: Sequence[str] | None = None,
    max_chips: int | None = None,
    spot: bool = False,
    tier: str | None = None,
    regions: Sequence[str] = (),
    rates: Mapping[str, Any] | str | Path | None = None,
    verify: int = 0,
    verify_seconds: float = 300.0,
    progress: Progress = silent,
) -> ServingPlan:
    """The smallest slice of each generation that holds the weights and the cache.

    Args:
        model: A preset's name, a config.json, a `TransformerConfig`, or a `Workload` of one.
        batch: Requests served at once.
        context: Tokens each of them ends with, 8192 where no other length is given.
        prompt_tokens: Tokens each comes with; the context less the new ones by default.
        new_tokens: Tokens each is answered with; half of the context by default.
        formats: Of the weights: bf16, int8, fp8, int4, vq.
        cache: Format of keys, values and latents: bf16, fp8, int8, int4, pq4, pq2, as
            `Generator(kv=…)` keeps them. Linear states stay as they are.
        activations: What products round to: bf16, or int8 or fp8, which is faster where weights
            have that format and the chip multiplies it.
        generations: Chips, or slices such as "v6e-8", to consider; all chips with public slices
            and rates by default.
        max_chips: Larger slices are left out.
        spot: Prices of spot capacity, whose preemptions are not counted; the same as `tier="spot"`.
        tier: "on_demand", "spot", or a tier of your own `rates`, such as "reserved-1y".
        regions: Where it may run; anywhere when left out.
        rates: Prices of your own over the public ones; see `PriceBook.with_rates`.
        verify: So many of the smallest slices are compiled: prefill and decode of `generate`, with
            weights and cache as they are asked for, but for those in codes.
        verify_seconds: No compile starts after so long.
        progress: Called with each stage of a compile.

    Raises:
        TPUValidationError: A format or a size is wrong.
    """
    kept = parse_cache_format(cache).name
    served = [
        ServedFormats(
            weights=_format(name, WEIGHT_FORMATS, "weight"),
            cache=kept,
            activations=_format(activations, ACTIVATION_FORMATS, "activation"),
        )
        for name in formats
    ]
    config = transformer_config(model)
    asked = ServedModel.of(config)
    Range(1, MOST_SEQUENCES).check_whole("batch", batch, unit="sequences")
    if max_chips is not None:
        COUNT.check_whole("max_chips", max_chips, unit="chips")
    market = Market.asked(spot=spot, tier=tier, regions=regions, rates=rates)
    traffic = _traffic(asked, batch, context, prompt_tokens, new_tokens)
    if generations is None:
        generations = [c.name for c in list_chips() if c.rules and not unknown_rate(c)]
    for name in generations:
        one = named_slice(name)
        refuse_unknown_rates(get_chip(name) if one is None else one.chip)
    choices = tuple(
        _choose(asked, _slices(generation, max_chips), each, traffic, market)
        for generation in generations
        for each in served
    )
    if verify:
        choices = verify_servers(
            config, traffic, choices, most=verify, seconds=verify_seconds, progress=progress
        )
    return ServingPlan(asked.name, traffic, kept, market.tier, choices)


def _format(name: str, known: Collection[str], of: str) -> str:
    found = spelled_as(name, known)
    if found is None:
        raise TPUValidationError(
            f"'{name}' is no {of} format; use {', '.join(known)}." + did_you_mean(name, known)
        )
    return found


def _traffic(
    model: ServedModel, batch: int, context: int | None, prompt: int | None, new: int | None
) -> ServingTraffic:
    """The lengths asked for; those left out follow from the others."""
    whole = Range(2, model.max_seq_len)
    unit = f"tokens of {model.name}"
    given = {"context": context, "prompt_tokens": prompt, "new_tokens": new}
    for name, value in given.items():
        if value is not None:
            allowed = whole if name == "context" else Range(1, model.max_seq_len - 1)
            allowed.check_whole(name, value, unit=unit)
    if prompt is not None and new is not None:
        context = prompt + new if context is None else context
    elif context is None:
        context = min(USUAL_CONTEXT, model.max_seq_len)
    if new is None:
        new = context // 2 if prompt is None else context - prompt
    prompt = context - new if prompt is None else prompt
    if prompt < 1 or new < 1 or prompt + new != context:
        raise ConfigError(
            f"a prompt of {prompt} and {new} new tokens are not the context of {context}; "
            "leave one of context, prompt_tokens and new_tokens out."
        )
    whole.check_whole("context", context, unit=unit)
    return ServingTraffic(batch=batch, prompt=prompt, new=new)


@dataclass(frozen=True)
class _Offered:
    """Slices of one generation, the smallest first, or the one that was named."""

    name: str
    slices: Sequence[Slice]
    most: str  # words for the largest


def _slices(generation: str, max_chips: int | None) -> _Offered:
    one = named_slice(generation)
    if one is not None:
        refuse_too_many_chips(one, max_chips)
        return _Offered(generation, [one], "it has")
    found = sorted(list_slices(generation), key=lambda on: on.chips)
    if max_chips is None:
        return _Offered(generation, found, "its largest slice has")
    few = [on for on in found if on.chips <= max_chips]
    if not few:
        least = f"its smallest slice, {found[0]}, has {found[0].chips:,} chips"
        return _Offered(generation, [], f"{least}, and max_chips is {max_chips:,}")
    return _Offered(generation, few, f"its largest slice of {max_chips:,} chips or fewer has")


def _served(server: Server) -> float:
    return server.throughput().tokens_per_s


def _choose(
    model: ServedModel,
    offered: _Offered,
    formats: ServedFormats,
    traffic: ServingTraffic,
    market: Market,
) -> ServingChoice:
    held = model.weight_bytes(formats.weights)
    cached = model.cache_bytes(traffic.context, formats.cache) * traffic.batch
    for on in offered.slices:
        best = max(servers_on(on, model, traffic, formats), key=_served, default=None)
        if best is not None:
            price, region = market.quote(on)
            return ServingChoice(
                generation=offered.name,
                formats=formats,
                weight_bytes=held,
                cache_bytes=cached,
                slice=str(on),
                chips=on.chips,
                multiplied=formats.multiplied(on),
                tensor=best.tensor,
                replicas=best.replicas,
                room_for=best.room_for,
                decode=best.decode(),
                prefill=best.prefill(),
                modelled=best.throughput(),
                device_bytes=best.device_bytes,
                room_bytes=room_bytes(on),
                usd_per_chip_hour=price,
                region=region,
            )
    room = offered.most
    if offered.slices:
        largest = max(room_bytes(on) * on.devices for on in offered.slices)
        room += f" room for {largest / 2**30:,.0f}"
    return ServingChoice(
        generation=offered.name,
        formats=formats,
        weight_bytes=held,
        cache_bytes=cached,
        slice=None,
        chips=None,
        reason=f"needs {(held + cached) / 2**30:,.0f} GiB, {room}",
    )

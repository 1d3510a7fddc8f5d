"""`plan_serving`: the smallest slices that can serve a model, and their speed."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from ..errors import ConfigError, TPUError, TPUValidationError, did_you_mean
from ..hardware import Slice, get_chip, list_chips, list_slices
from ..hardware.formats import spelled_as
from ..hardware.stored_formats import CACHE_FORMATS, WEIGHT_FORMATS, parse_cache_format
from ..models.defaults import SERVING_CONTEXT
from ..plain_data import JsonMapping
from ..runtime.progress import Progress, silent
from ..runtime.ranges import COUNT, Range
from .answer.serving_answer import CompiledServing, ServingChoice, ServingPlan
from .cost.candidates import named_slice, refuse_too_many_chips, refuse_unknown_rates, unknown_rate
from .cost.money import Market
from .cost.serving_model import (
    ServedFormats,
    ServedModel,
    Server,
    ServingTraffic,
    room_bytes,
    servers_on,
)
from .memory_optimizer import transformer_config

if TYPE_CHECKING:
    from ..models.transformer.config import TransformerConfig


USUAL_FORMATS = ("bf16", "int8", "int4", "vq")  # fp8 takes as much as int8
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
    rates: JsonMapping | str | Path | None = None,
    verify: int = 0,
    verify_seconds: float = 300.0,
    progress: Progress = silent,
) -> ServingPlan:
    """Return the smallest slice of each generation that has memory for weights and cache.

    Args:
        model: A preset, a config.json, a `TransformerConfig`, or a `Workload` of one.
        batch: Concurrent requests.
        context: Tokens per sequence at its end; 8192 if no other length is given.
        prompt_tokens: Prompt tokens per request; by default the context without the new tokens.
        new_tokens: New tokens per request; by default half of the context.
        formats: Weight formats: bf16, int8, fp8, int4, vq.
        cache: Cache format: bf16, fp8, int8, int4, pq4, pq2, as in `Generator(kv=…)`. States of
            linear attention keep their format.
        activations: Format that matmuls round activations to: bf16, int8 or fp8; the narrow ones
            are faster if weights have the same format and the chip multiplies it.
        generations: Chips, or slices such as "v6e-8"; by default all chips with public slices and
            rates.
        max_chips: Most chips of a slice.
        spot: Whether to use spot prices, without preemptions; the same as `tier="spot"`.
        tier: "on_demand", "spot", or a tier of your own `rates`, such as "reserved-1y".
        regions: Allowed regions; any by default.
        rates: Your own prices, which override public ones; see `PriceBook.with_rates`.
        verify: How many of the smallest slices to compile: prefill and decode of `generate` in
            these formats, except formats with codebooks.
        verify_seconds: No compile starts after this time.
        progress: Called with each stage of a compile.

    Raises:
        TPUValidationError: A format or a size is not valid.
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
    """Return the traffic; lengths that were not given follow from the others."""
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
        context = min(SERVING_CONTEXT, model.max_seq_len)
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
    """Slices of one generation, the smallest first, or one named slice."""

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


NO_BOOKS = "there are no codebooks to compile {} in codes with; this is by arithmetic alone"
NOT_MULTIPLIED = (
    "generation multiplies weights in {0.weights} with bf16, not with {0.activations}; this is by "
    "arithmetic alone"
)


def verify_servers(
    config: "TransformerConfig",
    traffic: ServingTraffic,
    choices: Sequence[ServingChoice],
    *,
    most: int,
    seconds: float,
    progress: Progress = silent,
) -> tuple[ServingChoice, ...]:
    """Return the choices after compiling the smallest `most` of them.

    No compile starts after `seconds`. Choices that were not compiled have the reason.
    """
    began = monotonic()
    order = sorted(
        (n for n, one in enumerate(choices) if one.chips is not None),
        key=lambda n: choices[n].chips or 0,
    )
    found, compiled = list(choices), 0
    for number in order:
        one = choices[number]
        why = _not_compiled(one.formats, one.multiplied)
        if why:
            said = CompiledServing(reason=why)
        elif compiled >= most:
            said = CompiledServing(reason=f"only {most} were to be compiled")
        elif monotonic() - began > seconds:
            said = CompiledServing(reason=f"{seconds:g} s were up")
        else:
            compiled += 1
            said = compile_server(config, traffic, one, progress=progress)
        found[number] = replace(one, compiled=said)
    return tuple(found)


def _not_compiled(formats: ServedFormats, multiplied: str | None) -> str:
    """Return why generation has no program for these formats; "" if it has."""
    if WEIGHT_FORMATS[formats.weights].entries:
        return NO_BOOKS.format("weights")
    if CACHE_FORMATS[formats.cache].entries:
        return NO_BOOKS.format("a cache")
    if multiplied not in (None, "bf16", "fp8"):
        return NOT_MULTIPLIED.format(formats)
    return ""


def compile_server(
    config: "TransformerConfig",
    traffic: ServingTraffic,
    choice: ServingChoice,
    *,
    progress: Progress = silent,
) -> CompiledServing:
    """Compile prefill and decode of generation for the slice and split of a choice."""
    from ..checker.decoding import check_decoding

    assert choice.slice is not None
    assert choice.replicas is not None
    assert choice.tensor is not None
    try:
        found = check_decoding(
            config,
            on=choice.slice,
            mesh={"data": choice.replicas, "tensor": choice.tensor},
            batch_size=traffic.batch,
            context=traffic.context,
            prompt=traffic.prompt,
            prefill_rows=choice.replicas,
            weights=choice.formats.weights,
            activations=choice.multiplied or "bf16",
            kv=choice.formats.cache,
            progress=progress,
        )
    except TPUError as error:
        return CompiledServing(reason=str(error))
    unknown = found.decode.no_prediction or found.prefill.no_prediction
    reason = unknown if found.fits else "the compiler says that it does not fit"
    return CompiledServing(
        fits=found.fits,
        decode_s=found.token_s,
        prefill_s=found.prefill_s,
        device_bytes=found.decode.memory.total_bytes,
        prompt=found.prompt,
        context=found.context,
        reason=reason,
    )

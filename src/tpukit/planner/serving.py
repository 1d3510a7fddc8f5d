"""How small a slice can serve a model: weights and cache in HBM, speed by the roofs."""

from collections.abc import Collection, Sequence

from ..errors import ConfigError, TPUValidationError, did_you_mean
from ..hardware import Slice, get_chip, list_chips, list_slices
from ..hardware.cache_formats import parse_cache_format
from ..hardware.formats import spelled_as
from ..hardware.stored_formats import WEIGHT_FORMATS
from ..runtime.progress import Progress, silent
from ..runtime.ranges import Range
from .answer.serving_answer import ServingChoice, ServingPlan
from .cost.served_model import ServedModel
from .cost.serving_model import ServedFormats, Server, Traffic, room_bytes, servers_on
from .search.candidates import named_slice, refuse_unknown_rates, unknown_rate
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
    traffic = _traffic(asked, batch, context, prompt_tokens, new_tokens)
    if generations is None:
        generations = [c.name for c in list_chips() if c.rules and not unknown_rate(c)]
    for name in generations:
        one = named_slice(name)
        refuse_unknown_rates(get_chip(name) if one is None else one.chip)
    choices = tuple(
        _choose(asked, generation, each, traffic) for generation in generations for each in served
    )
    if verify:
        choices = verify_servers(
            config, traffic, choices, most=verify, seconds=verify_seconds, progress=progress
        )
    return ServingPlan(asked.name, traffic, kept, choices)


def _format(name: str, known: Collection[str], of: str) -> str:
    found = spelled_as(name, known)
    if found is None:
        raise TPUValidationError(
            f"'{name}' is no {of} format; use {', '.join(known)}." + did_you_mean(name, known)
        )
    return found


def _traffic(
    model: ServedModel, batch: int, context: int | None, prompt: int | None, new: int | None
) -> Traffic:
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
    return Traffic(batch=batch, prompt=prompt, new=new)


def _chips(on: Slice) -> int:
    return on.chips


def _served(server: Server) -> float:
    return server.throughput().tokens_per_s


def _choose(
    model: ServedModel, generation: str, formats: ServedFormats, traffic: Traffic
) -> ServingChoice:
    held = model.weight_bytes(formats.weights)
    each = model.cache_bytes(traffic.context, formats.cache)
    one = named_slice(generation)
    slices = sorted(list_slices(generation) if one is None else [one], key=_chips)
    needed = held + each * traffic.batch
    for on in slices:
        best = max(servers_on(on, model, traffic, formats), key=_served, default=None)
        if best is not None:
            return ServingChoice(
                generation=generation,
                formats=formats,
                weight_bytes=held,
                cache_bytes=each * traffic.batch,
                slice=str(on),
                chips=on.chips,
                multiplied=formats.multiplied(on),
                tensor=best.tensor,
                replicas=best.replicas,
                room_for=best.room_for,
                decode=best.decode(),
                prefill=best.prefill(),
                modelled=best.throughput(),
            )
    largest = max(room_bytes(on) * on.devices for on in slices)
    has = "its largest slice has" if one is None else "it has"
    reason = f"needs {needed / 2**30:,.0f} GiB, {has} room for {largest / 2**30:,.0f}"
    return ServingChoice(
        generation=generation,
        formats=formats,
        weight_bytes=held,
        cache_bytes=each * traffic.batch,
        slice=None,
        chips=None,
        reason=reason,
    )

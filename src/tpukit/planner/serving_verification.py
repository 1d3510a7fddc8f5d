"""The compiler's word on a server: the programs of generation, on the slice and split planned."""

from collections.abc import Sequence
from dataclasses import replace
from time import monotonic
from typing import TYPE_CHECKING

from ..errors import TPUError
from ..hardware.cache_formats import CACHE_FORMATS
from ..hardware.stored_formats import WEIGHT_FORMATS
from ..runtime.progress import Progress, silent
from .answer.serving_answer import CompiledServing, ServingChoice
from .cost.serving_model import ServedFormats, ServingTraffic

if TYPE_CHECKING:
    from ..models.transformer.config import TransformerConfig

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
    """The choices, the smallest `most` that can be compiled with what the compiler says of them.

    No compile starts after so many seconds. What was left out says why.
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
    """Why generation has no program of these formats; "" where it has."""
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

"""`tpukit quantize --verdict`: what chips make of a checkpoint that was published quantized."""

from pathlib import Path
from typing import Annotated

import typer

from ..runtime.ranges import COUNT
from . import job_options as options
from .values import within

Source = Annotated[Path, typer.Argument(help="A folder of quantized weights, or a config.json.")]
Verdict = Annotated[
    bool, typer.Option("--verdict", help="Say which chips multiply it as it is, and the way out.")
]
On = Annotated[str, typer.Option(help="Generations or slices: v5e,v6e,7x or v6e-8.")]
Batch = Annotated[
    int, typer.Option(help="With --verdict: sequences at once.", callback=within(COUNT))
]
Context = Annotated[
    int, typer.Option(help="With --verdict: tokens each may hold.", callback=within(COUNT))
]


def quantize(
    source: Source,
    verdict: Verdict = False,
    on: On = "v5e,v6e,7x",
    batch: Batch = 1,
    context: Context = 8192,
    json: options.Json = False,
) -> None:
    """Say what chips make of a quantized checkpoint: native, emulated or refused."""
    from ..errors import ConfigError

    if not verdict:
        raise ConfigError("what shall be done with the checkpoint? write --verdict.")
    show_verdict(source, on, batch, context, json=json)


def show_verdict(source: Path, on: str, batch: int, context: int, *, json: bool) -> None:
    """Say of each chip whether it multiplies the checkpoint as it is, and the way out."""
    from ..planner.published_verdict import quantization_verdict
    from .output import show

    chips = [word.strip() for word in on.split(",")]
    show(quantization_verdict(source, on=chips, batch=batch, context=context), json=json)

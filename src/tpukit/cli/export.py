"""`tpukit export`: a run's checkpoint as a Hugging Face folder, or in its framework's own files."""

from pathlib import Path
from typing import Annotated

import typer

from ..runtime.ranges import INDEX
from . import job_options as options
from .values import output_folder, within

Run = Annotated[
    str, typer.Argument(help="A run directory, one of its checkpoints, or a folder of weights.")
]
Out = Annotated[Path, typer.Argument(help="Folder to create.", callback=output_folder)]
Step = Annotated[
    int | None,
    typer.Option(help="Step of the checkpoint. [default: the newest]", callback=within(INDEX)),
]

Adapters = Annotated[
    bool,
    typer.Option("--adapters", help="Export only the adapters of a LoRA run, in peft's format."),
]


def export(
    run: Run,
    out: Out,
    step: Step = None,
    adapters: Adapters = False,
    json: options.Json = False,
) -> None:
    """Write a run's parameters as a Hugging Face folder, or in the files of its own framework."""
    from ..runtime.environment import configure_tpu_environment
    from .output import show

    configure_tpu_environment()
    from ..training.export import export_run

    show(export_run(run, out, step=step, adapters=adapters), json=json)

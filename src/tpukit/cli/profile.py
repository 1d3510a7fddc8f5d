"""`tpukit profile`: what bounds a recorded program, and what to change."""

from pathlib import Path
from typing import Annotated

import typer

from ..records.names import CHECK_FILE
from .job_options import Json
from .output import show
from .values import output_file


def profile(
    recording: Annotated[
        Path,
        typer.Argument(help="A run, or what TPUProfiler or jax.profiler wrote: a folder or file."),
    ],
    predicted: Annotated[
        Path | None,
        typer.Option(
            help="A check (`tpukit check … --json`) to show beside it; a run may hold it."
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write a page, too.", callback=output_file)
    ] = None,
    json: Json = False,
) -> None:
    """Show what bounds a recorded program: compute, memory, communication, input or overhead."""
    from ..observe.profiling.page import write_page
    from ..observe.profiling.profile import read_newest
    from ..observe.profiling.steps import predicted_step

    if predicted is None and (recording / CHECK_FILE).is_file():
        predicted = recording / CHECK_FILE
    step = None if predicted is None else predicted_step(predicted)
    found = read_newest(recording)
    show(found.analysis, json=json)
    if html is not None:
        written = write_page([found], step, html)
        typer.echo(f"wrote {written}, {written.stem}.json and {written.stem}.pftrace", err=True)

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
        str,
        typer.Argument(
            help="A run directory (also gs://…), or a folder or file written by TPUProfiler or "
            "jax.profiler."
        ),
    ],
    predicted: Annotated[
        Path | None,
        typer.Option(
            help="Report of `tpukit check … --json` to compare with. [default: the run's own]"
        ),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="File for an HTML page.", callback=output_file)
    ] = None,
    json: Json = False,
) -> None:
    """Show what bounds a recorded program: compute, memory, communication, input or overhead."""
    from ..observe.profiling.page import write_page
    from ..observe.profiling.profile import read_newest
    from ..observe.profiling.steps import predicted_step
    from ..records.mirror import readable

    folder = readable(recording, traces=True)
    if predicted is None and (folder / CHECK_FILE).is_file():
        predicted = folder / CHECK_FILE
    step = None if predicted is None else predicted_step(predicted)
    found = read_newest(folder)
    show(found.analysis, json=json)
    if html is not None:
        written = write_page([found], step, html)
        typer.echo(f"wrote {written}, {written.stem}.json and {written.stem}.pftrace", err=True)

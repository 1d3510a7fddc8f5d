"""`tpukit rehearse`: the whole life of a job on this machine, in minutes."""

from pathlib import Path
from typing import Annotated

import typer

from ..errors import ConfigError
from ..runtime.ranges import Range
from . import job_options as options
from .program import command_behind
from .values import output_folder, within

Target = Annotated[
    str | None, typer.Argument(help="A job.yaml or a preset; a tiny job by default.")
]
Steps = Annotated[int, typer.Option(help="To train for here.", callback=within(Range(30, 100_000)))]
Output = Annotated[
    Path,
    typer.Option(
        "--output",
        "-o",
        help="Folder for report.html, runs and the small model; an earlier rehearsal is replaced.",
        callback=output_folder,
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Only show what would be trained here, and why.")
]


def rehearse(
    called: typer.Context,
    target: Target = None,
    data: options.Data = None,
    on: options.On = None,
    set_: options.Set = None,
    steps: Steps = 120,
    output: Output = Path("runs/rehearsal"),
    dry_run: DryRun = False,
    json: options.Json = False,
) -> None:
    """Plan, check, launch, preempt, resume, watch, profile, quantize and use a job, all here.

    What is launched runs as real processes on an emulated cloud: no TPU, no account, no network.
    A large job is planned and checked as it is, and a small one of its kind is trained. Exit 0
    where all stages passed, 1 where one failed; `report.html` shows predicted beside measured.
    """
    if command_behind(called) is not None:
        raise ConfigError(
            "a rehearsal is of a job, which tpukit launches, stops and resumes, and it launches no "
            "command of yours; judge that with `tpukit check --on SLICE -- COMMAND`, or rehearse a "
            "preset (`tpukit rehearse tiny --on v6e-8`)."
        )
    from ..job.reading import read_job
    from ..rehearsal.rehearse import default_job, prepare, refuse_other_folder
    from ..rehearsal.rehearse import rehearse as play
    from ..runtime.environment import configure_tpu_environment
    from .output import show
    from .rehearse_view import watching

    asked = options.changes(set_, on=on, train__data=data)
    job = read_job(target, asked) if target is not None else default_job().replace(asked)
    if dry_run:
        refuse_other_folder(output)
        show(prepare(job, steps=steps, folder=output)[1], json=json)
        return
    configure_tpu_environment()
    with watching() as view:
        result = play(job, steps=steps, folder=output, progress=view.say, tell=view.tell)
    show(result, json=json)
    raise typer.Exit(result.exit_code)

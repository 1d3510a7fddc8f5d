"""`tpukit launch`: a job on a pod, from asking for chips to the last step."""

from typing import TYPE_CHECKING, Annotated

import typer

from . import job_options as options

if TYPE_CHECKING:
    from ..pods.launching.background import BackgroundRun
    from ..pods.store import Store

FIRST_S = 10.0
"""How long a detached run is watched; one that makes a step or ends is left at once."""
Provider = Annotated[
    str | None, typer.Option(help="local, gcp, gke, gce or ssh; TPUKIT_PROVIDER, or local.")
]
Spot = Annotated[
    bool | None, typer.Option("--spot/--no-spot", help="Capacity that may be taken away, for less.")
]
Name = Annotated[str | None, typer.Option(help="Of the run; the same again goes on where it was.")]
Detach = Annotated[
    bool, typer.Option("--detach", help="Return once it runs; tpukit pods logs NAME follows it.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check everything here, ask nobody for anything.")
]


def launch(
    target: options.Target,
    data: options.Data = None,
    steps: options.Steps = None,
    on: options.On = None,
    provider: Provider = None,
    spot: Spot = None,
    name: Name = None,
    set_: options.Set = None,
    detach: Detach = False,
    dry_run: DryRun = False,
    json: options.Json = False,
) -> None:
    """Run a job on a pod: exit 0 done or stopped and saved, 5 no capacity, 6 given up, or train's.

    Ctrl-C lets the job save and end, and gives the pod back.
    """
    from pathlib import Path

    from ..job.reading import is_job_file, read_job
    from ..pods.launching.background import BackgroundRun
    from ..pods.launching.launch import prepare_launch, run_name
    from .output import Announcer, show

    asked = options.changes(set_, on=on, launch__spot=spot, train__data=data, train__steps=steps)
    job = read_job(target, asked)
    stem = Path(target).stem if is_job_file(target) else str(job.model)
    ready = prepare_launch(
        job, provider=provider, name=name or run_name(stem, job), progress=Announcer()
    )
    if dry_run:
        show(ready, json=json)
        return
    run = BackgroundRun.start(ready)
    if detach:
        raise typer.Exit(_leave(run, ready.manager.store, json=json))
    raise typer.Exit(follow(run, ready.manager.store, steps=job.train.steps, json=json))


def follow(
    run: "BackgroundRun", store: "Store", *, steps: int | None = None, json: bool = False
) -> int:
    """Show a run until it ends; Ctrl-C stops it. Returns the exit code."""
    from ..pods.cost import CostReport
    from ..pods.launching.result import LaunchResult
    from ..runtime.interruption import undone_if_interrupted
    from .launch_view import watching
    from .output import Announcer, show

    Announcer.hush()  # from here on the run itself is shown
    last = None
    with undone_if_interrupted(lambda: _stop(run)), watching(steps, to_stderr=json) as view:
        for entry in run.entries():
            view.show(entry)
            last = entry
    assert last is not None  # the end of a run is an entry
    result = LaunchResult(run.name, last, CostReport.of(store, run.name))
    show(result, json=json)
    return result.exit_code


def _stop(run: "BackgroundRun") -> None:
    """Let the job save and end, for as long as a command that was interrupted may take."""
    import sys

    if not run.stop(wait_s=1.4):
        sys.stderr.write(f"{run.name} is still saving; tpukit pods logs {run.name} shows it\n")


def _leave(run: "BackgroundRun", store: "Store", *, json: bool) -> int:
    """Tell how a run stands after its first seconds, and leave it. Returns the exit code."""
    from ..pods.cost import CostReport
    from ..pods.launching.result import LaunchResult
    from .launch_view import line_of
    from .output import Announcer, show

    last = run.begin(FIRST_S)
    Announcer.hush()
    if last is not None and last.is_final:
        result = LaunchResult(run.name, last, CostReport.of(store, run.name))
        show(result, json=json)
        return result.exit_code
    how = "starting" if last is None else line_of(last, "").removeprefix("-- ")
    typer.echo(
        f"{run.name} goes on in the background: {how}. tpukit pods logs {run.name} follows it, "
        f"tpukit pods down {run.name} ends it"
    )
    return 0

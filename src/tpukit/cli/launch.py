"""`tpukit launch`: run a job on a pod."""

import re
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from . import job_options as options

if TYPE_CHECKING:
    from ..pods.launching.background import BackgroundRun
    from ..pods.launching.run_log import RunLogEntry
    from ..pods.store import Store


FIRST_S = 10.0
"""How long a detached run is watched; one that makes a step or ends is left at once."""
Provider = Annotated[
    str | None,
    typer.Option(help="local, gcp, gke, gce or ssh. [default: TPUKIT_PROVIDER, or local]"),
]
Spot = Annotated[
    bool | None,
    typer.Option(
        "--spot/--no-spot", help="Request spot capacity: cheaper, but it can be preempted."
    ),
]
Name = Annotated[
    str | None,
    typer.Option(help="Name of the run; launching the same name again continues the run."),
]
Detach = Annotated[
    bool,
    typer.Option(
        "--detach", help="Return as soon as the job runs; `tpukit pods logs NAME` follows it."
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Check everything, request nothing. On gke, print the manifest for `kubectl apply "
        "-f -`, checked by the cluster if it answers.",
    ),
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

    Ctrl-C lets the job save and end, and releases the pod.
    """
    import json as json_module
    from pathlib import Path

    from ..job.reading import is_job_file, read_job
    from ..pods.launching.background import BackgroundRun
    from ..pods.launching.launch import prepare_launch, run_name
    from .output import Announcer, show

    asked = options.changes(set_, on=on, launch__spot=spot, train__data=data, train__steps=steps)
    job = read_job(target, asked)
    stem = Path(target).stem if is_job_file(target) else str(job.model)
    announce = Announcer()
    ready = prepare_launch(
        job, provider=provider, name=name or run_name(stem, job), progress=announce
    )
    if dry_run:
        documents = ready.render(announce)
        if documents is None:
            show(ready, json=json)
        else:
            Announcer.hush()
            content = documents.to_dict() if json else documents.to_yaml().rstrip("\n")
            typer.echo(json_module.dumps(content) if json else content)
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
    from ..pods.launching.run_log import LaunchResult
    from ..runtime.interruption import undone_if_interrupted
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
    """Let the job save and end, within the time that an interrupted command may take."""
    import sys

    if not run.stop(wait_s=1.4):
        sys.stderr.write(f"{run.name} is still saving; tpukit pods logs {run.name} shows it\n")


def _leave(run: "BackgroundRun", store: "Store", *, json: bool) -> int:
    """Show the state of a run after its first seconds, leave it running, return the exit code."""
    from ..pods.cost import CostReport
    from ..pods.launching.run_log import LaunchResult
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


STEPS_EVERY_S = 5.0
"""Off a terminal, a step is shown this often."""
_OWN_STEP = re.compile(r"step \d+/\d+  loss ")


class LaunchView(Protocol):
    """Shows the entries of a run's log."""

    def show(self, entry: "RunLogEntry") -> None:
        """Show one entry."""
        ...


class PlainLaunchView:
    """Shows one line per entry, for files and pipes.

    Steps are shown for jobs that print none themselves; `tpukit train` prints its own.
    """

    def __init__(self, steps: int | None, *, to_stderr: bool) -> None:
        self._of = f"/{steps}" if steps else ""
        self._stream = sys.stderr if to_stderr else sys.stdout
        self._shown_at: float | None = None
        self._prints_steps = False

    def show(self, entry: "RunLogEntry") -> None:
        """Write the entry; only some of the steps are written."""
        self._prints_steps = self._prints_steps or is_own_step(entry)
        if entry.kind == "step":
            if self._shown_at is None:
                self._shown_at = entry.at  # the job's own line on its first step may follow
            if self._prints_steps or entry.at - self._shown_at < STEPS_EVERY_S:
                return
            self._shown_at = entry.at
        text = line_of(entry, self._of)
        if text:
            self._stream.write(text + "\n")
            self._stream.flush()


@contextmanager
def watching(steps: int | None, *, to_stderr: bool = False) -> Generator[LaunchView]:
    """Return a view: with a progress bar on a terminal, otherwise plain lines."""
    from ..terminal import open_console, text_column

    console = open_console(stderr=True)
    if not console.is_terminal:
        yield PlainLaunchView(steps, to_stderr=to_stderr)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
    from rich.text import Text

    columns = (
        text_column("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        text_column("{task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("asking for a pod", total=steps, loss="")

        class BarView:
            figures = ""  # of the job's own lines on its steps

            def show(self, entry: "RunLogEntry") -> None:
                if is_own_step(entry):
                    self.figures = entry.text.partition("  ")[2]
                    return
                if entry.kind == "step":
                    loss = entry.data["loss"]
                    shown = self.figures or ("" if loss is None else f"loss {loss:.4f}")
                    bar.update(
                        task, completed=entry.data["step"], loss=shown, description="training"
                    )
                    return
                if entry.kind in ("pod", "attempt"):
                    bar.update(task, description=entry.text.split(":")[0])
                if text := line_of(entry, ""):
                    bar.console.print(Text(text))

        yield BarView()


def is_own_step(entry: "RunLogEntry") -> bool:
    """Whether a line is a step line of `tpukit train`."""
    return entry.kind == "line" and _OWN_STEP.match(entry.text) is not None


def line_of(entry: "RunLogEntry", of: str) -> str:
    """Return the line of an entry; "" for the last one, which is shown as a result."""
    if entry.is_final:
        return ""
    if entry.kind == "step":
        loss = entry.data["loss"]
        return f"step {entry.data['step']}{of}" + ("" if loss is None else f"  loss {loss:.4f}")
    return f"[{entry.host}] {entry.text}" if entry.host else f"-- {entry.text}"

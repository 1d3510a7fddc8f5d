"""`tpukit rehearse`: play the whole life of a job on this machine, in minutes."""

import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from ..errors import ConfigError
from ..runtime.ranges import Range
from . import job_options as options
from .program import command_behind
from .values import output_folder, within

if TYPE_CHECKING:
    from ..rehearsal.rehearse import Began
    from ..rehearsal.stage import Played


Target = Annotated[
    str | None, typer.Argument(help="A job.yaml file or a preset. [default: a tiny job]")
]
Steps = Annotated[
    int,
    typer.Option(
        help="Number of steps to train on this machine.", callback=within(Range(30, 100_000))
    ),
]
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
    """Plan, check, launch, preempt, resume, watch, profile, quantize and use a job on this machine.

    Launched jobs run as real processes on an emulated cloud, without TPU, account or network. A
    large job is planned and checked as it is, and a small one of its kind is trained. Exit 0 if all
    stages passed, 1 if one failed; `report.html` compares predictions with measurements.
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


class RehearsalView(Protocol):
    """Shows the stages of a rehearsal."""

    def say(self, line: str) -> None:
        """Show the current action."""
        ...

    def tell(self, event: "Began | Played") -> None:
        """Show that a stage starts, or its result."""
        ...


class PlainRehearsalView:
    """Prints one line per event to standard error, with the seconds since the start."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._stage = ""

    def say(self, line: str) -> None:
        """Print the current action."""
        self._write(f"{self._stage:>8}  {line}")

    def tell(self, event: "Began | Played") -> None:
        """Print that a stage starts, or its result."""
        self._stage = event.name
        self._write(line_of(event) or f"{event.name:>8}: {event.question}")

    def _write(self, text: str) -> None:
        sys.stderr.write(f"{time.perf_counter() - self._began:6.1f} s  {text}\n")
        sys.stderr.flush()


@contextmanager
def watching() -> Generator[RehearsalView]:
    """Return a view: with a spinner on a terminal, otherwise plain lines."""
    from rich.text import Text

    from ..terminal import open_console

    console = open_console(stderr=True)
    if not console.is_terminal:
        yield PlainRehearsalView()
        return
    with console.status("starting the emulated cloud") as status:

        class SpinningView:
            stage = ""

            def say(self, line: str) -> None:
                width = max(20, console.width - len(self.stage) - 8)
                status.update(Text.assemble((self.stage, "bold"), f"  {line}"[:width]))

            def tell(self, event: "Began | Played") -> None:
                if (line := line_of(event)) is not None:
                    console.print(Text(line))
                    return
                self.stage = event.name
                self.say(event.question)

        yield SpinningView()


def line_of(event: "Began | Played") -> str | None:
    """Return the line of a finished stage; None for one that starts."""
    from ..rehearsal.result import MARKS
    from ..rehearsal.stage import Played

    if not isinstance(event, Played):
        return None
    return f"{MARKS[event.verdict]} {event.name:<8} {event.seconds:5.1f} s  {event.sentence}"

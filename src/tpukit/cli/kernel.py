"""`tpukit kernel`: list ops, estimate their time without the chip, and choose their blocks."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..exit_codes import ExitCode
from ..runtime.ranges import SECONDS
from ..shown import Renderable, Shown
from .job_options import Json, NoCache
from .kernel_options import (
    Backward,
    CaseNames,
    Implementation,
    On,
    OptionTexts,
    Shapes,
    ValueTexts,
    choose_cases,
    chosen_chips,
    counted,
    find_op,
    read_values,
    start,
)
from .output import Announcer, print_whole
from .values import output_folder, within

if TYPE_CHECKING:
    from ..kernels.registry.op import Op
    from ..kernels.timing import KernelBench
    from ..kernels.tuning import TuningResult
    from ..runtime.progress import Progress


app = typer.Typer(no_args_is_help=True)
OP_ARGUMENT: Any = typer.Argument(
    help="Name of an op (`tpukit kernel list`), or your own as file.py:name."
)


@app.command("list")
def list_ops(json: Json = False) -> None:
    """List the ops with their cases and implementations."""
    start()
    from ..kernels.registry.registry import OpListing
    from .output import show

    show(OpListing.from_registry(), json=json)


@app.command()
def bench(
    op: Annotated[str | None, OP_ARGUMENT] = None,
    on: On = None,
    case: CaseNames = None,
    shape: Shapes = None,
    option: OptionTexts = None,
    value: ValueTexts = None,
    implementation: Implementation = None,
    backward: Backward = False,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Time only the kernel and only its first case: one compile per chip."
        ),
    ] = False,
    no_cache: NoCache = False,
    json: Json = False,
) -> None:
    """Estimate an op's time on chips you do not have: cycles, bound, error, against XLA.

    Exit 4 if a kernel has no estimate, because it does not compile or cannot be simulated.
    """
    start()
    from ..errors import TPUValidationError
    from ..kernels.timing import bench_op, default_implementations
    from .output import show

    if op is None or on is None:
        raise TPUValidationError("name an op and --on v6e to time it.")
    found = find_op(op)
    chips = chosen_chips(on)
    cases = choose_cases(found, case, shape, option)
    values = read_values(value, cases)
    wanted = implementation or default_implementations(found)
    if quick:
        cases, wanted = cases[:1], wanted[:1]
    result = bench_op(
        found,
        chips,
        cases=cases,
        direction="backward" if backward else "forward",
        implementations=wanted,
        values=values,
        progress=_numbered(len(chips) * len(cases) * len(wanted)),
        on_rows=None if json else _show_as_they_come(),
        use_cache=not no_cache,
    )
    if json:
        show(result, json=True)
    if not result.is_timed:
        raise typer.Exit(ExitCode.COULD_NOT_TELL)


@app.command()
def tune(
    op: Annotated[str, OP_ARGUMENT],
    on: On = None,
    case: CaseNames = None,
    shape: Shapes = None,
    option: OptionTexts = None,
    value: ValueTexts = None,
    forward_only: Annotated[
        bool, typer.Option("--forward-only", help="Do not tune the backward pass.")
    ] = False,
    seconds: Annotated[
        float | None,
        typer.Option(help="Maximum time per case and generation.", callback=within(SECONDS)),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option("--measure", help="Measure on the TPU of this machine instead of estimating."),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            help="Folder for OP/CHIP.json. [default: the op's own data]",
            callback=output_folder,
        ),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Write nothing.")] = False,
    no_cache: NoCache = False,
    json: Json = False,
) -> None:
    """Choose an op's block sizes for a generation, without a TPU, and write them as data."""
    start()
    from ..errors import TPUValidationError
    from ..kernels.tuning import local_chip, measured_timer, tune_op
    from .output import show

    found = find_op(op)
    if (on is None) != measure:
        raise TPUValidationError(
            "say what to tune for, by one of the two: --on v6e, or --measure for the TPU here."
        )
    chips = [local_chip()] if measure else chosen_chips(on or "")
    cases = choose_cases(found, case, shape, option)
    values = read_values(value, cases)
    folder = None if dry_run else folder_for(found, output)
    results: list[Any] = []
    with counted(None) as progress:
        for one in cases:
            for chip in chips:
                result = tune_op(
                    found,
                    one,
                    chip,
                    gradient=not forward_only,
                    seconds=seconds,
                    timer=measured_timer(found, one, values=values) if measure else None,
                    origin="measured" if measure else "model",
                    values=values,
                    progress=progress,
                    use_cache=not no_cache,
                )
                if folder is not None:
                    result.save(folder)
                results.append(result)
    show(Tunings(tuple(results), folder), json=json)


def _numbered(total: int) -> "Progress":
    """Number the progress lines of compiles."""
    say, number = Announcer(), itertools.count(1)
    return lambda line: say(f"[{next(number)}/{total}] {line}")


def _show_as_they_come() -> "Callable[[KernelBench], None]":
    """Print each case as soon as it is timed."""
    from rich.text import Text

    titled = False

    def show_one(bench: "KernelBench") -> None:
        nonlocal titled
        if not titled:
            print_whole(Text(bench.title, style="bold"))
            titled = True
        print_whole(bench.part(list(bench.rows)))

    return show_one


def folder_for(op: "Op", out: Path | None) -> Path:
    """Return the folder for the blocks of an op: `out`, or the op's own.

    Raises:
        TPUValidationError: There is no folder, or it cannot be written.
    """
    from ..errors import TPUValidationError
    from ..kernels.blocks.tuned import data_folder
    from ..kernels.registry.registry import builtin_ops
    from ..runtime.files import try_output_folder

    if out is None and op.name not in builtin_ops():
        raise TPUValidationError(f"{op.name} has no folder of its own: give -o, or --dry-run.")
    folder = data_folder(op.name) if out is None else out / op.name
    try_output_folder(folder)
    return folder


@dataclass(frozen=True)
class Tunings(Shown):
    """The result of tuning.

    Attributes:
        folder: Folder that the blocks were written to; None if they were not.
    """

    results: "tuple[TuningResult, ...]"
    folder: Path | None = None

    @property
    def note(self) -> str:
        """The place of the blocks, and how dispatch uses them."""
        from ..kernels.blocks.tuned import data_folder

        if self.folder is None:
            return "Nothing was written (--dry-run)."
        where = f"The blocks are in {self.folder}"
        if self.folder == data_folder(self.results[0].op):
            return f"{where}, where dispatch finds them."
        return f"{where}; use_tuned_blocks({str(self.folder.parent)!r}) lets dispatch take them."

    def __rich__(self) -> Renderable:
        from rich.console import Group
        from rich.text import Text

        return Group(*self.results, Text(self.note))

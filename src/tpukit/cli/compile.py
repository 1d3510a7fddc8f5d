"""`tpukit compile`: compile one function with the TPU compiler, without a TPU."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..exit_codes import ExitCode
from ..plain_data import JsonObject
from ..runtime.ranges import SECONDS
from ..shown import Renderable, Shown
from . import job_options as options
from .output import Announcer, refusals_as_exit_codes, show
from .values import output_file, within

if TYPE_CHECKING:
    from ..compiler import CompiledStep, CompileRequest
    from ..compiler.timeline import StepPrediction
    from ..hardware import Slice


@dataclass(frozen=True)
class _CompileAnswer(Shown):
    """A compiled program and its predicted time, or the reason why there is none."""

    compiled: "CompiledStep"
    prediction: "StepPrediction | None"
    no_prediction: str
    _facts = "**compiled prediction no_prediction"

    def __rich__(self) -> Renderable:
        from rich.console import Group
        from rich.text import Text

        missing = Text(f"no step time: {self.no_prediction}", style="dim")
        return Group(self.compiled, "", self.prediction or missing)


def compile_function(
    function: Annotated[
        str,
        typer.Argument(
            help="file.py:step (module:step) with --arg for each argument, or file.py:build that "
            "returns a function, a Workload or a model."
        ),
    ],
    on: Annotated[str, typer.Option(help="Slice to compile for, e.g. v6e-8 or v5p:4x4x4.")],
    arg: options.Arg = None,
    mesh: options.Mesh = None,
    donate: options.Donate = None,
    flags: options.Flags = "",
    hlo: Annotated[
        Path | None,
        typer.Option(help="File for the scheduled HLO text.", callback=output_file),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            help="File for the compiled program; load_executable loads it on the slice.",
            callback=output_file,
        ),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option(
            help="How far to compile: memory, schedule (seconds) or codegen (longer; "
            "adds FLOPs and code size)."
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Time limit of the compile in seconds.", callback=within(SECONDS))
    ] = 1800,
    json: options.Json = False,
) -> None:
    """Compile a function or a model's step: exit 0 done, 3 does not fit, 4 could not tell."""
    say = Announcer()
    say(f"reading {function}")
    from ..checker.check import NOT_ASKED_FOR, predict
    from ..compiler import save_executable
    from ..compiler.aot import run_request
    from ..compiler.compiled import parse_until
    from ..errors import ConfigError
    from ..hardware import Slice
    from ..runtime.files import write_output

    target = Slice.parse(on)
    stage = parse_until(until or ("schedule" if save is None else "codegen"))
    if save is not None and (stage != "codegen" or hlo is not None):
        raise ConfigError("--save needs the whole compile: leave out --until and --hlo.")
    with refusals_as_exit_codes():
        request = _lowered(function, target, arg, mesh, donate, flags, say)
        say(f"compiling {function} for {target} up to {stage}")
        if save is not None:
            show(save_executable(request, save, timeout_s=timeout), json=json)
            return
        compiled = run_request(request, until=stage, timeout_s=timeout, progress=say)
    if hlo is not None:
        write_output(hlo, compiled.hlo)
    step, reason = (None, NOT_ASKED_FOR) if stage == "memory" else predict(compiled, progress=say)
    show(_CompileAnswer(compiled, step, reason), json=json)
    if not compiled.fits:
        raise typer.Exit(ExitCode.DOES_NOT_FIT)


def _lowered(
    function: str,
    target: "Slice",
    arg: list[str] | None,
    mesh: str | None,
    donate: list[int] | None,
    flags: str,
    say: Announcer,
) -> "CompileRequest":
    """Lower the function with its arguments, or the training step of the model it builds."""
    from ..checker.check import as_job
    from ..checker.compiling import lower_job
    from ..compiler.program.entry import built, is_builder
    from ..runtime.environment import configure_tpu_environment

    asked: JsonObject = {"on": str(target)}
    asked |= {} if mesh is None else {"mesh": mesh}
    asked |= {} if not flags else {"options": options.compiler_options(flags)}
    configure_tpu_environment()  # or jax would look for a TPU, slowly, in this process
    found = built(function) if ":" in function else None
    is_model = found is None or not is_builder(found)
    if arg or not is_model:
        return options.lower_function(function, asked, arg or [], donate, progress=say)
    return lower_job(as_job(function, asked), progress=say)

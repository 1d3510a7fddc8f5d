"""`tpukit flags`: check, list, explain and tune XLA and libtpu flags of the installed versions."""

import os
from dataclasses import replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ConfigError
from ..exit_codes import ExitCode
from ..runtime.ranges import COUNT, SECONDS, Range
from . import job_options as options
from .job_options import Json
from .output import Announcer, refusals_as_exit_codes, show
from .program import AskedProgram, ProgramCommand, command_behind, is_kept
from .values import refuse, refuse_all_but, within

if TYPE_CHECKING:
    from ..runtime.flags import FlagRegistry


app = typer.Typer(no_args_is_help=True)

LEVEL = Range(0, 3)


class Parser(StrEnum):
    """The parser of a flag."""

    libtpu = "libtpu"
    xla = "xla"


# A flag given as an argument starts with dashes, but it is no option of the command.
FLAG_ARGUMENTS = {"ignore_unknown_options": True}


@app.command(context_settings=FLAG_ARGUMENTS)
def check(
    flags: Annotated[
        list[str] | None,
        typer.Argument(
            help="Flags such as '--xla_tpu_rwb_fusion=false --xla_dump_to=/tmp/hlo'. "
            "[default: XLA_FLAGS and LIBTPU_INIT_ARGS]"
        ),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(
            help="Also compile a program with the flags for this chip generation; needs no TPU."
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Check flags; exit code 2 when one would stop a job."""
    from ..runtime.flags import inspect_environment, inspect_flags, trial_compile
    from .output import show, working

    registry = _registry()
    if not flags:
        report = inspect_environment(os.environ, registry=registry)
    else:
        report = inspect_flags(" ".join(flags), registry=registry)
    if on is not None and report.ok:
        with working(f"compiling with these flags for {on}"):
            target = trial_compile(report.values, on, registry=registry)
        report = replace(report, compiled_for=str(target))
    show(report, json=json)
    if not report.ok:
        raise typer.Exit(ExitCode.BAD_INPUT)


@app.command("list")
def list_flags(
    pattern: Annotated[
        str, typer.Argument(help="Part of a flag's name. [default: all flags]")
    ] = "",
    where: Annotated[Parser | None, typer.Option(help="List only flags of this parser.")] = None,
    level: Annotated[
        int | None,
        typer.Option(
            help="List the flags of an optimization level, 0 to 3.", callback=within(LEVEL)
        ),
    ] = None,
    on: Annotated[
        str | None, typer.Option(help="Chip generation for --level, such as v6e.")
    ] = None,
    refresh: Annotated[
        bool,
        typer.Option(
            "--refresh", help="Read the flags from the installed libtpu and jaxlib again."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """List flags of the installed libtpu and jaxlib, or those of an optimization level."""
    from ..hardware import get_chip
    from ..runtime.flags.bundles import HIGHEST_LEVEL, select
    from ..runtime.flags.setting import BundleListing, FlagListing
    from .output import show

    if level is None and on is None:
        registry = _registry(refresh=refresh)
        parser = None if where is None else where.value
        found = registry.search(pattern, parser=parser)
        show(FlagListing(tuple(found), registry.described), json=json)
        return
    generation = None if on is None else get_chip(on).name
    asked = HIGHEST_LEVEL if level is None else level
    chosen, skipped = select(asked, generation)
    matching = tuple(flag for name, flag in chosen.items() if pattern in name)
    show(BundleListing(asked, generation, matching, tuple(skipped)), json=json)


@app.command(context_settings=FLAG_ARGUMENTS)
def explain(
    flag: Annotated[str, typer.Argument(help="A flag, with or without its dashes.")],
    json: Json = False,
) -> None:
    """Show a flag's type, default, variable and effect, and the levels that set it."""
    from ..runtime.flags import explain_flag
    from .output import show

    show(explain_flag(flag.partition("=")[0], registry=_registry()), json=json)


def _registry(*, refresh: bool = False) -> "FlagRegistry":
    """Return the installed registry; the first read takes seconds, and is announced."""
    from ..runtime.flags import FlagRegistry
    from .output import working

    if not refresh and FlagRegistry.is_cached():
        return FlagRegistry.installed()
    with working("reading the flags of the installed libtpu and jaxlib"):
        return FlagRegistry.installed(refresh=refresh)


OF_COMMAND = ("program", "network")
BESIDE_PROGRAM = ("on", "flags", "budget", "seconds", "beam", "no_cache", "timeout", "json")


@app.command(cls=ProgramCommand)
def tune(
    called: typer.Context,
    target: options.MaybeTarget = None,
    on: options.On = None,
    batch: options.Batch = None,
    sequence: options.Sequence = None,
    mesh: options.Mesh = None,
    strategy: options.Strategy = None,
    remat: options.Remat = None,
    optimizer: options.Optimizer = None,
    moment_dtype: options.MomentDtype = None,
    microbatches: options.Microbatches = None,
    attention: options.Attention = None,
    set_: options.Set = None,
    arg: options.Arg = None,
    donate: options.Donate = None,
    flags: Annotated[str, typer.Option(help="Flags to start from.")] = "",
    budget: Annotated[
        int, typer.Option(help="Maximum number of compiles.", callback=within(COUNT))
    ] = 24,
    seconds: Annotated[
        float | None, typer.Option(help="Maximum time to search.", callback=within(SECONDS))
    ] = None,
    beam: Annotated[
        int,
        typer.Option(
            help="Number of best flag sets to keep after each group of flags.",
            callback=within(COUNT),
        ),
    ] = 1,
    program: Annotated[
        str | None,
        typer.Option(
            help="For a command: tune for this jitted function instead of the training step."
        ),
    ] = None,
    network: Annotated[
        bool, typer.Option("--network", help="For a command: allow network access.")
    ] = False,
    no_cache: options.NoCache = False,
    timeout: options.Timeout = None,
    json: options.Json = False,
) -> None:
    """Search compiler options for a job: exit 0 fits, 3 nothing fits, 4 could not tell.

    Any other jax program is tuned unmodified, behind two dashes: tpukit flags tune --on v6e-8 --
    python train.py. A capture of tpukit check --keep can be tuned too: tpukit flags tune FOLDER.
    """
    from ..checker.flag_tuning.search import tune_flags
    from ..compiler.aot import DEFAULT_TIMEOUT_S

    say = Announcer()
    typed = command_behind(called)
    kept = typed is None and is_kept(target)
    how: dict[str, Any] = {
        "budget": budget,
        "seconds": seconds,
        "beam": beam,
        "timeout_s": timeout or DEFAULT_TIMEOUT_S,
        "use_cache": not no_cache,
        "progress": say,
    }
    if typed is not None or kept:
        allowed = (*BESIDE_PROGRAM, *(["target"] if kept else OF_COMMAND))
        kind = "kept capture" if kept else "command of yours"
        refuse_all_but(called, allowed, f"is not for a {kind}.")
        folder = Path(target) if kept and target else None
        asked = AskedProgram(typed or (), folder, program, network=network, timeout_s=timeout)
        with refusals_as_exit_codes():
            started = options.compiler_options(flags) if flags else {}
            found = tune_flags(asked.capture_on_one(on, say), options=started, **how)
        show(found, json=json)
        raise typer.Exit(found.exit_code)
    refuse(called, OF_COMMAND, "is for a command; write it behind --, such as -- python train.py.")
    if target is None:
        raise ConfigError(
            "what should be tuned? Name a job.yaml, a preset, a folder that `tpukit check --keep` "
            "wrote, or a command behind --."
        )
    say(f"tuning {target}" + (f" on {on}" if on else ""))
    from ..checker.check import as_job
    from ..checker.compiling import lower_job
    from .job_options import lower_function

    wanted = options.job_changes(
        called,
        options=options.compiler_options(flags),
    )
    with refusals_as_exit_codes():
        request = (
            lower_function(target, wanted, arg, donate, progress=say)
            if arg
            else lower_job(as_job(target, wanted), progress=say, remember=not no_cache)
        )
        found = tune_flags(request, **how)
    show(found, json=json)
    raise typer.Exit(found.exit_code)

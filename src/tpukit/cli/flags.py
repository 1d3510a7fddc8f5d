"""`tpukit flags`: check, list, explain and tune XLA and libtpu flags against what is installed."""

import os
from dataclasses import replace
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated

import typer

from ..runtime.ranges import Range
from .flags_tune import tune
from .job_options import Json
from .program import ProgramCommand
from .values import within

if TYPE_CHECKING:
    from ..runtime.flags import FlagRegistry

app = typer.Typer(no_args_is_help=True)
app.command(cls=ProgramCommand)(tune)

WOULD_STOP_A_JOB = 2
LEVEL = Range(0, 3)


class Parser(StrEnum):
    """Which parser reads a flag."""

    libtpu = "libtpu"
    xla = "xla"


# A flag given as an argument starts with dashes, which must not make it an option.
FLAG_ARGUMENTS = {"ignore_unknown_options": True}


@app.command(context_settings=FLAG_ARGUMENTS)
def check(
    flags: Annotated[
        list[str] | None,
        typer.Argument(
            help="Such as '--xla_tpu_rwb_fusion=false --xla_dump_to=/tmp/hlo'; "
            "by default what XLA_FLAGS and LIBTPU_INIT_ARGS hold."
        ),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(help="Also compile with them for this generation; needs no TPU."),
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
        raise typer.Exit(WOULD_STOP_A_JOB)


@app.command("list")
def list_flags(
    pattern: Annotated[
        str, typer.Argument(help="Part of a name, as plain text; all by default.")
    ] = "",
    where: Annotated[Parser | None, typer.Option(help="Only flags this parser reads.")] = None,
    level: Annotated[
        int | None,
        typer.Option(help="What an optimization level sets, 0 to 3.", callback=within(LEVEL)),
    ] = None,
    on: Annotated[str | None, typer.Option(help="The generation for --level, such as v6e.")] = None,
    refresh: Annotated[
        bool, typer.Option("--refresh", help="Ask the installed libtpu and jaxlib again.")
    ] = False,
    json: Json = False,
) -> None:
    """List flags of the installed libtpu and jaxlib, or those of an optimization level."""
    from ..hardware import get_chip
    from ..runtime.flags.bundles import HIGHEST_LEVEL, select
    from ..runtime.flags.record import BundleListing, FlagListing
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
    """Say what a flag takes, its default, where it goes, what it does and which levels set it."""
    from ..runtime.flags import explain_flag
    from .output import show

    show(explain_flag(flag.partition("=")[0], registry=_registry()), json=json)


def _registry(*, refresh: bool = False) -> "FlagRegistry":
    """The installed registry; the first reading takes seconds, and says so."""
    from ..runtime.flags import FlagRegistry
    from .output import working

    if not refresh and FlagRegistry.is_cached():
        return FlagRegistry.installed()
    with working("reading the flags of the installed libtpu and jaxlib"):
        return FlagRegistry.installed(refresh=refresh)

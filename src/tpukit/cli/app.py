"""Register every command, and the options that all of them share."""

import os
import sys
from typing import Annotated

import typer

from . import (
    cache,
    check,
    config,
    dashboard,
    data,
    doctor,
    export,
    flags,
    generate,
    kernel,
    launch,
    mcp,
    plan,
    pods,
    presets,
    profile,
    quantize,
    rehearse,
    report,
    slices,
    top,
    train,
)
from . import compile as compile_command
from .examples import epilog
from .output import Announcer
from .program import ProgramCommand

app = typer.Typer(
    name="tpukit",
    help="From a laptop to a TPU pod: plan, check with the real TPU compiler, shard, train, watch.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # names of options stay whole, whatever the width, and can be copied
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        from .. import __version__

        typer.echo(f"tpukit {__version__}")
        raise typer.Exit


@app.callback()
def options(
    context: typer.Context,
    log_level: Annotated[
        str, typer.Option(help="debug, info, warning or error.", envvar="TPUKIT_LOG_LEVEL")
    ] = "warning",
    log_json: Annotated[bool, typer.Option("--log-json", help="Log as JSON lines.")] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error (TPUKIT_TRACEBACK=1).")
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", is_eager=True, callback=_print_version
        ),
    ] = False,
) -> None:
    """Options of every command."""
    from ..runtime.logs import setup_logging

    for stream in (sys.stdout, sys.stderr):
        # File names need not be valid text, and a terminal may lack some characters.
        stream.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
    if debug:
        os.environ["TPUKIT_TRACEBACK"] = "1"  # for the processes that commands start as well
    context.call_on_close(Announcer.hush)  # however the command ends
    setup_logging(level=log_level, json=log_json)


app.command("doctor")(doctor.doctor)
app.command("slices")(slices.slices)
app.command("slice")(slices.slice_info)
app.command("prices")(slices.prices)
app.command("presets")(presets.presets)
app.command("plan")(plan.plan)
app.command("check", cls=ProgramCommand)(check.check)
app.command("compile")(compile_command.compile_function)
app.command("train")(train.train)
app.command("profile")(profile.profile)
app.command("launch")(launch.launch)
app.command("rehearse", cls=ProgramCommand)(rehearse.rehearse)
app.command("top")(top.top)
app.command("dashboard")(dashboard.dashboard)
app.command("generate")(generate.generate)
app.command("export")(export.export)
app.command("quantize")(quantize.quantize)
app.command("mcp")(mcp.mcp)
app.add_typer(
    pods.app, name="pods", help="List, allocate, release and emulate pods, and report their costs."
)
app.add_typer(data.app, name="data", help="Tokenize text, and inspect data sets.")
app.add_typer(
    kernel.app, name="kernel", help="Time and tune kernels with the compiler, without a TPU."
)
app.add_typer(flags.app, name="flags", help="Check, list, explain and tune XLA and libtpu flags.")
app.add_typer(cache.app, name="cache", help="Show or empty the cache of compiled programs.")
app.add_typer(
    report.app,
    name="report",
    help="Compare checks and measurements; write a check as a page or trace.",
)
app.add_typer(config.app, name="config", help="Show, check and write configurations.")


def _add_examples(one: typer.Typer, words: tuple[str, ...]) -> None:
    for group in one.registered_groups:
        if group.typer_instance is not None:
            _add_examples(group.typer_instance, (*words, str(group.name)))
    for command in one.registered_commands:
        called = command.name or getattr(command.callback, "__name__", "").replace("_", "-")
        command.epilog = epilog(" ".join((*words, called)))


_add_examples(app, ())

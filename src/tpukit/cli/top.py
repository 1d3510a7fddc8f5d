"""`tpukit top`: chips, hosts and the run on one screen."""

from pathlib import Path
from typing import Annotated

import typer

from ..runtime.ranges import Range
from .job_options import Json
from .output import show
from .values import within


def top(
    run: Annotated[
        str | None,
        typer.Argument(
            help="A run directory, or a folder of run directories, also gs://…. [default: the "
            "newest in runs/]"
        ),
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print once and exit.")] = False,
    json: Json = False,
    rate: Annotated[
        float,
        typer.Option(help="Seconds between updates.", callback=within(Range(0.1, 3600))),
    ] = 1.0,
    hosts: Annotated[
        str | None,
        typer.Option(
            help="host:port of monitors, or run directories, to show instead of this machine."
        ),
    ] = None,
    replay: Annotated[
        Path | None, typer.Option(help="Replay a recorded readings.jsonl file.", dir_okay=False)
    ] = None,
) -> None:
    """Show chips, hosts and the run: live on a terminal, otherwise as one plain table."""
    from ..observe.top.feed import Feed
    from ..terminal import open_console

    console = open_console()
    is_live = console.is_terminal and not once and not json
    asked = [one.strip() for one in (hosts or "").split(",") if one.strip()]
    feed = Feed(run, hosts=asked, recording=replay, at_once=not is_live)
    try:
        if is_live:
            from ..observe.top.feed import watch

            watch(feed, rate_s=rate, console=console)
        else:
            show(feed.read(), json=json)
    finally:
        feed.close()

"""`tpukit flags tune`: search the compiler's options for a job, each tried by a compile."""

from typing import Annotated

import typer

from . import job_options as options
from .check_run import Announcer, Run, refusals_as_exit_codes


def tune(
    target: options.Target,
    on: options.On = None,
    batch: options.Batch = None,
    sequence: options.Sequence = None,
    mesh: options.Mesh = None,
    strategy: options.Strategy = None,
    remat: options.Remat = None,
    optimizer: options.Optimizer = None,
    microbatches: options.Microbatches = None,
    attention: options.Attention = None,
    arg: options.Arg = None,
    donate: options.Donate = None,
    flags: Annotated[str, typer.Option(help="Options to start from.")] = "",
    budget: Annotated[int, typer.Option(help="Compiles to spend at most.")] = 24,
    seconds: Annotated[float | None, typer.Option(help="Time to spend at most.")] = None,
    beam: Annotated[int, typer.Option(help="Sets of options kept from group to group.")] = 1,
    no_cache: options.NoCache = False,
    timeout: options.Timeout = 1800,
    json: options.Json = False,
) -> None:
    """Search compiler options for a job: exit 0 fits, 3 nothing fits, 4 could not tell."""
    say = Announcer()
    say(f"tuning {target}" + (f" on {on}" if on else ""))
    from ..checker.flag_tuning.search import tune_flags
    from .check import read_job, read_options
    from .output import show

    settings = {
        "slice": on,
        "batch_size": batch,
        "sequence_length": sequence,
        "mesh": mesh,
        "strategy": strategy,
        "remat": remat,
        "optimizer": optimizer,
        "microbatches": microbatches,
        "attention": attention,
        "options": read_options(flags) or None,
    }
    run = Run(say, use_cache=not no_cache, dump=None, timeout_s=timeout)
    with refusals_as_exit_codes():
        request = (
            run.lower_function(target, arg, donate, settings)
            if ":" in target
            else run.lower(read_job(target, settings), say.stage)
        )
        found = tune_flags(
            request,
            budget=budget,
            seconds=seconds,
            beam=beam,
            timeout_s=timeout,
            use_cache=not no_cache,
            progress=say,
        )
    show(found, json=json)
    raise typer.Exit(found.exit_code)

"""`tpukit flags tune`: search the compiler's options for a job, each tried by a compile."""

from typing import Annotated

import typer

from ..runtime.ranges import COUNT, SECONDS
from . import job_options as options
from .output import Announcer, refusals_as_exit_codes
from .values import within


def tune(
    target: options.Target,
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
    flags: Annotated[str, typer.Option(help="Options to start from.")] = "",
    budget: Annotated[
        int, typer.Option(help="Compiles to spend at most.", callback=within(COUNT))
    ] = 24,
    seconds: Annotated[
        float | None, typer.Option(help="Time to spend at most.", callback=within(SECONDS))
    ] = None,
    beam: Annotated[
        int,
        typer.Option(help="Sets of options kept from group to group.", callback=within(COUNT)),
    ] = 1,
    no_cache: options.NoCache = False,
    timeout: options.Timeout = None,
    json: options.Json = False,
) -> None:
    """Search compiler options for a job: exit 0 fits, 3 nothing fits, 4 could not tell."""
    say = Announcer()
    say(f"tuning {target}" + (f" on {on}" if on else ""))
    from ..checker.check import as_job
    from ..checker.compiling import lower_job
    from ..checker.flag_tuning.search import tune_flags
    from ..compiler.aot import DEFAULT_TIMEOUT_S
    from .job_options import lower_function
    from .output import show

    asked = options.changes(
        set_,
        on=on,
        batch_size=batch,
        sequence_length=sequence,
        mesh=mesh,
        strategy=strategy,
        remat=remat,
        train__optimizer=optimizer,
        train__moment_dtype=moment_dtype,
        microbatches=microbatches,
        attention=attention,
        options=options.compiler_options(flags),
    )
    with refusals_as_exit_codes():
        request = (
            lower_function(target, asked, arg, donate, progress=say)
            if arg
            else lower_job(as_job(target, asked), progress=say, remember=not no_cache)
        )
        found = tune_flags(
            request,
            budget=budget,
            seconds=seconds,
            beam=beam,
            timeout_s=timeout or DEFAULT_TIMEOUT_S,
            use_cache=not no_cache,
            progress=say,
        )
    show(found, json=json)
    raise typer.Exit(found.exit_code)

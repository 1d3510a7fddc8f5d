"""`tpukit flags tune`: search the compiler's options for a job, each tried by a compile."""

from typing import Annotated

import typer

from .check_run import Announcer, Run


def tune(
    target: Annotated[
        str, typer.Argument(help="A preset, a job.yaml, or module:function with --arg.")
    ],
    on: Annotated[str | None, typer.Option(help="Slice, e.g. v6e-8 or 2xv6e-256.")] = None,
    batch: Annotated[int | None, typer.Option(help="Examples in a step, all devices.")] = None,
    sequence: Annotated[int | None, typer.Option(help="Tokens in an example.")] = None,
    mesh: Annotated[str | None, typer.Option(help="fsdp=8,tensor=4; -1 for the rest.")] = None,
    strategy: Annotated[str | None, typer.Option(help="fsdp, fsdp+megatron, …")] = None,
    remat: Annotated[str | None, typer.Option(help="none, minimal, full, offload=…")] = None,
    optimizer: Annotated[str | None, typer.Option(help="adamw, 'adamw mu=bfloat16', …")] = None,
    microbatches: Annotated[int | None, typer.Option(help="Pieces a step is cut into.")] = None,
    attention: Annotated[str | None, typer.Option(help="Attention of the model.")] = None,
    arg: Annotated[
        list[str] | None, typer.Option(help="Of a function: bf16[8,128]; repeat.")
    ] = None,
    donate: Annotated[list[int] | None, typer.Option(help="Arguments that may be reused.")] = None,
    flags: Annotated[str, typer.Option(help="Options to start from.")] = "",
    budget: Annotated[int, typer.Option(help="Compiles to spend at most.")] = 24,
    seconds: Annotated[float | None, typer.Option(help="Time to spend at most.")] = None,
    beam: Annotated[int, typer.Option(help="Sets of options kept from group to group.")] = 1,
    no_cache: Annotated[bool, typer.Option(help="Compile again, keep nothing.")] = False,
    timeout: Annotated[float, typer.Option(help="Seconds until one compile is killed.")] = 1800,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Search compiler options for a job: exit 0 fits, 3 nothing fits, 4 could not tell."""
    say = Announcer()
    say(f"tuning {target}" + (f" on {on}" if on else ""))
    from ..compiler.flag_search import tune_flags
    from ..compiler.verdict import COULD_NOT_TELL, DOES_NOT_FIT
    from ..errors import TPUNotAvailableError, TPUOutOfMemoryError, XLACompilationError
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
    try:
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
    except TPUOutOfMemoryError as error:  # refused before there was anything to report
        typer.secho(f"DOES NOT FIT {error}", fg=typer.colors.RED)
        raise typer.Exit(DOES_NOT_FIT) from None
    except (XLACompilationError, TPUNotAvailableError) as error:
        typer.secho(f"could not tell: {error}", fg=typer.colors.YELLOW, err=True)
        raise typer.Exit(COULD_NOT_TELL) from None
    show(found, json=json)
    raise typer.Exit(found.exit_code)

"""`tpukit flags tune`: search the compiler's options for a job, each tried by a compile."""

from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import ConfigError
from ..runtime.ranges import COUNT, SECONDS
from . import job_options as options
from .modes import refuse, refuse_all_but
from .output import Announcer, refusals_as_exit_codes, show
from .program import AskedProgram, command_behind, is_kept
from .values import within

OF_COMMAND = ("program", "network")
BESIDE_PROGRAM = ("on", "flags", "budget", "seconds", "beam", "no_cache", "timeout", "json")


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
    program: Annotated[
        str | None,
        typer.Option(help="Of a command: the jitted function to tune for instead of the step."),
    ] = None,
    network: Annotated[
        bool, typer.Option("--network", help="Of a command: let it reach other machines.")
    ] = False,
    no_cache: options.NoCache = False,
    timeout: options.Timeout = None,
    json: options.Json = False,
) -> None:
    """Search compiler options for a job: exit 0 fits, 3 nothing fits, 4 could not tell.

    Any other jax program is tuned as it is, behind two dashes: tpukit flags tune --on v6e-8 --
    python train.py. So is a capture that tpukit check --keep wrote: tpukit flags tune FOLDER.
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

    wanted = options.changes(
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
            lower_function(target, wanted, arg, donate, progress=say)
            if arg
            else lower_job(as_job(target, wanted), progress=say, remember=not no_cache)
        )
        found = tune_flags(request, **how)
    show(found, json=json)
    raise typer.Exit(found.exit_code)

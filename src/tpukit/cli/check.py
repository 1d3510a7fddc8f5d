"""`tpukit check`: does it fit and how long is a step, from the real compiler, on no TPU."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import job_options as options
from .check_run import Announcer, Run, find_fixes, predict, refusals_as_exit_codes

if TYPE_CHECKING:
    from ..checker.result import CheckResult
    from ..job.job import Plan


def check(
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
    flags: options.Flags = "",
    memory_only: Annotated[
        bool, typer.Option("--memory-only", help="Stop at the verdict on memory.")
    ] = False,
    fix: Annotated[bool, typer.Option("--fix", help="Verify fixes, each by a compile.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write the report as one HTML file.")] = None,
    perfetto: Annotated[
        Path | None, typer.Option(help="Write the timeline: trace.json or trace.pftrace.")
    ] = None,
    no_cache: options.NoCache = False,
    dump: Annotated[Path | None, typer.Option(help="Keep the compiler's files here.")] = None,
    timeout: options.Timeout = 1800,
    json: options.Json = False,
) -> None:
    """Check a job against the real TPU compiler: exit 0 fits, 3 does not fit, 4 could not tell."""
    say = Announcer()
    say(f"checking {target}" + (f" on {on}" if on else ""))
    from rich.console import Console

    from ..checker.fixes import is_thin
    from ..checker.result import CheckResult
    from ..compiler.memory.view import verdict_line
    from ..job.model_source import is_own_model
    from .output import show

    settings: dict[str, Any] = {
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
    run = Run(say, use_cache=not no_cache, dump=dump, timeout_s=timeout)
    with refusals_as_exit_codes():
        job = None if ":" in target else read_job(target, settings)
        compiled = run.job(job) if job is not None else run.function(target, arg, donate, settings)
        memory = compiled.memory  # what the compiler wrote may turn out not to add up
    if not json:
        Console().print(verdict_line(memory))
    prediction, reason = None, "not asked for"
    if not memory_only:
        if memory.fits:  # what does not fit has no schedule to simulate
            say("simulate the schedule; kernels not seen before are compiled alone")
        prediction, reason = predict(compiled, job)
    reference = job is not None and not is_own_model(job.model)
    wanted = reference and (fix or is_thin(memory))
    result = CheckResult(
        compiled=compiled,
        job=None if job is None else job.to_dict(),
        prediction=prediction,
        no_prediction=reason,
        fixes=find_fixes(run, job, compiled, verify=fix) if wanted and job is not None else None,
        memory_only=memory_only,
        target=target,
        asked={**settings, "arg": arg, "donate": donate},
        options=settings["options"] if job is None else job.options,
    )
    _write(result, html, perfetto, say)
    if json:
        show(result, json=True)
    else:
        Console().print(result.details())
    raise typer.Exit(result.exit_code)


def read_job(target: str, settings: dict[str, Any]) -> "Plan":
    """The job that a preset's name or a file, with the options given, describes."""
    from ..job.job import Plan
    from ..job.reading import is_job_file

    if is_job_file(target):
        return Plan.from_yaml(Path(target), **settings)
    given = {name: value for name, value in settings.items() if value is not None}
    return Plan.from_dict({"model": target, **given})


def read_options(flags: str) -> dict[str, Any]:
    """Compiler options from a flag string."""
    if not flags:
        return {}
    from ..runtime.flags import as_compiler_options, parse_flags

    return dict(as_compiler_options(parse_flags(flags)))


def _write(result: "CheckResult", html: Path | None, perfetto: Path | None, say: Announcer) -> None:
    """Write the page and the trace that were asked for."""
    from ..checker.report import RecordedStep, write_html, write_perfetto

    if html is None and perfetto is None:
        return
    report = result.to_report()
    if html is not None:
        say(f"wrote {write_html(report, html)}")
    if perfetto is not None:
        step = RecordedStep.of(report)
        memory = report.get("live_memory")
        say(f"wrote {write_perfetto(step, perfetto, memory=memory, name=step.name)}")

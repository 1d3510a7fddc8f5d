"""`tpukit check`: whether a job fits and how long a step takes, from the TPU compiler."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ConfigError
from ..plain_data import JsonMapping
from ..runtime.ranges import COUNT
from . import job_options as options
from .check_toolchains import TypedCheck, check_program_toolchains, check_toolchains, end_comparison
from .output import Announcer, print_whole, refusals_as_exit_codes
from .program import AskedProgram, check_command, command_behind, end_check, is_kept
from .values import output_file, output_folder, refuse, refuse_all_but, within

if TYPE_CHECKING:
    from ..checker.decoding import DecodingCheck
    from ..checker.result import CheckResult
    from ..runtime.progress import Progress


OF_DECODE = ("prompt_length", "weights", "kv")
OF_PROGRAM = ("program", "list_programs", "per_step", "network", "keep")
BESIDE_PROGRAM = (
    *("on", "flags", "memory_only", "html", "perfetto", "no_cache", "dump", "timeout", "json"),
    *("baseline", "fix", "toolchain"),
    *OF_PROGRAM,
)
OF_COMMAND = ("program", "network", "keep")
OF_ONE_CHECK = ("decode", "baseline", "fix", "perfetto", "handover", "dump")


def check(
    called: typer.Context,
    target: options.MaybeTarget = None,
    torch: options.Torch = None,
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
    flags: options.Flags = "",
    memory_only: Annotated[
        bool, typer.Option("--memory-only", help="Check only whether the program fits into memory.")
    ] = False,
    fix: Annotated[bool, typer.Option("--fix", help="Verify fixes, each by a compile.")] = False,
    decode: Annotated[
        bool,
        typer.Option(
            "--decode",
            help="Check prefill and decode of generation: --batch-size sequences that grow to "
            "--sequence-length tokens.",
        ),
    ] = False,
    prompt_length: Annotated[
        int | None,
        typer.Option(
            help="With --decode: tokens per prompt. [default: --sequence-length]",
            callback=within(COUNT),
        ),
    ] = None,
    weights: Annotated[
        str | None,
        typer.Option(help="With --decode: format of the weights: bf16, int8, int4 or fp8."),
    ] = None,
    kv: Annotated[
        str | None,
        typer.Option(help="With --decode: format of the KV cache: bf16, fp8, int8 or int4."),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(help="Write the report as one HTML file.", callback=output_file),
    ] = None,
    perfetto: Annotated[
        Path | None,
        typer.Option(help="Write the timeline: trace.json or trace.pftrace.", callback=output_file),
    ] = None,
    handover: Annotated[
        Path | None,
        typer.Option(
            help="For a PyTorch model: folder for a sharding plan and script for torch_tpu.",
            callback=output_folder,
        ),
    ] = None,
    toolchain: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[,NAME]",
            help="Compare with another jax and libtpu: jax-0.12.0.1, jax-0.12.0.1-py3.12, default.",
        ),
    ] = None,
    program: Annotated[
        str | None,
        typer.Option(
            help="For a command: check this jitted function instead of the training step."
        ),
    ] = None,
    list_programs: Annotated[
        bool, typer.Option("--list-programs", help="For a command: list its large programs.")
    ] = False,
    per_step: Annotated[
        int | None,
        typer.Option(
            help="For a command: tokens or examples per step, to compute prices.",
            callback=within(COUNT),
        ),
    ] = None,
    network: Annotated[
        bool, typer.Option("--network", help="For a command: allow network access.")
    ] = False,
    keep: Annotated[
        Path | None,
        typer.Option(
            help="For a command: folder for the capture; `tpukit check FOLDER` checks it again.",
            callback=output_folder,
        ),
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option(
            help="An earlier report (--json). Exit code 5 if the program no longer "
            "fits, or is over 5 % slower."
        ),
    ] = None,
    no_cache: options.NoCache = False,
    dump: Annotated[
        Path | None,
        typer.Option(help="Folder for the compiler's own output files.", callback=output_folder),
    ] = None,
    timeout: options.Timeout = None,
    json: options.Json = False,
) -> None:
    """Check a job against the real TPU compiler: exit 0 fits, 3 does not fit, 4 could not tell.

    Any other jax program is checked unmodified, behind two dashes: tpukit check --on v6e-8 --
    python train.py. It runs as if on the slice up to its training step, and nothing large is
    executed.
    """
    say = Announcer()
    typed = command_behind(called)
    kept = typed is None and is_kept(target)
    if typed is not None or kept:
        refuse_all_but(
            called,
            (*BESIDE_PROGRAM, *(["target"] if kept else [])),
            "is not for a command of yours.",
        )
        if kept:
            refuse(called, OF_COMMAND, "is for a command, and a kept capture has been run already.")
        asked = AskedProgram(
            typed or (),
            folder=Path(target) if kept and target else None,
            program=program,
            list_programs=list_programs,
            network=network,
            keep=keep,
            timeout_s=timeout,
        )
        if toolchain is not None:
            refuse(
                called,
                (*OF_ONE_CHECK, "list_programs"),
                "is for one check, and --toolchain compares several.",
            )
            words = {"--on": on, "--per-step": per_step, "--timeout": timeout}
            words |= {"--memory-only": memory_only, "--no-cache": no_cache}
            with refusals_as_exit_codes():
                comparison = check_program_toolchains(
                    toolchain, asked, on, words, flags=flags, progress=say
                )
            end_comparison(comparison, html=html, json=json, progress=say)
        check_command(
            asked,
            on,
            say,
            json=json,
            baseline=baseline,
            write=lambda result: _write(result, html, perfetto, say),
            options=options.compiler_options(flags) if flags else {},
            per_step=per_step,
            memory_only=memory_only,
            fix=fix,
            timeout_s=timeout,
            use_cache=not no_cache,
            dump_to=dump,
        )
    refuse(called, OF_PROGRAM, "is for a command; write it behind --, such as -- python train.py.")
    with refusals_as_exit_codes():
        target = options.torch_or_target(target, torch)
    if not decode:
        refuse(called, OF_DECODE, "is of --decode; add that, or leave it out.")
    if not arg:
        refuse(called, ("donate",), "is of a function's arguments; describe them with --arg.")
    if toolchain is not None:
        refuse(called, OF_ONE_CHECK, "is for one check, and --toolchain compares several.")
    say(f"checking {target}" + (f" on {on}" if on else ""))
    from dataclasses import replace

    from ..checker.check import as_job, check_request
    from ..checker.check import check as check_job
    from ..compiler.memory.view import verdict_line
    from .job_options import lower_function
    from .output import show

    asked = options.job_changes(called)
    if toolchain is not None:
        switches = {"--memory-only": memory_only, "--no-cache": no_cache}
        typed = TypedCheck(target, asked, flags, arg or (), donate or (), timeout, switches)
        with refusals_as_exit_codes():
            comparison = check_toolchains(toolchain, typed, progress=say)
        end_comparison(comparison, html=html, json=json, progress=say)
    asked |= {} if not flags else {"options": options.compiler_options(flags)}
    if decode:
        unused = {"fix": fix, "arg": arg, "donate": donate, "perfetto": perfetto, "dump": dump}
        with refusals_as_exit_codes():
            found = check_decode(
                target,
                asked,
                prompt_length=prompt_length,
                refused={**unused, "handover": handover},
                progress=say,
                weights=weights or "bf16",
                kv=kv,
                memory_only=memory_only,
                timeout_s=timeout,
                use_cache=not no_cache,
            )
        if html is not None:
            write_pages(found, html, say)
        show(found, json=json)
        raise typer.Exit(found.exit_code)
    how: dict[str, Any] = {
        "memory_only": memory_only,
        "timeout_s": timeout,
        "use_cache": not no_cache,
        "dump_to": dump,
        "progress": say,
        "verdict": None if json else lambda memory: print_whole(verdict_line(memory)),
    }
    with refusals_as_exit_codes():
        if arg and handover is not None:
            raise ConfigError("--handover is for a job's model, and --arg checks a bare function.")
        if arg:
            request = lower_function(target, asked, arg, donate, progress=say)
            found = check_request(request, **how)
            result = replace(found, target=target, asked={**asked, "arg": arg, "donate": donate})
        else:
            job = as_job(target, asked)
            if handover is not None:
                from ..torch.handover import handover_plan

                handover_plan(job)  # refuses now what cannot be handed over after minutes of work
            result = replace(check_job(job, fix=fix, **how), target=target, asked=asked)
    _write(result, html, perfetto, say)
    if handover is not None:
        from ..torch.handover import write_handover

        with refusals_as_exit_codes():
            written = write_handover(result, handover)
        say(f"wrote {written.plan} and {written.script}")
    end_check(result, json=json, baseline=baseline)


def _write(result: "CheckResult", html: Path | None, perfetto: Path | None, say: Announcer) -> None:
    """Write the requested page and trace."""
    from ..checker.report import step_title, write_html, write_perfetto

    if html is None and perfetto is None:
        return
    report = result.to_report()
    spans = () if result.prediction is None else result.prediction.spans
    if html is not None:
        say(f"wrote {write_html(report, html, spans=spans)}")
    if perfetto is not None:
        memory, name = report.get("live_memory"), step_title(report)
        say(f"wrote {write_perfetto(spans, perfetto, memory=memory, name=name)}")


# Options of a decoding check; all other options belong to training.
_ASKED = ("on", "batch_size", "sequence_length", "mesh", "options")


def check_decode(
    target: str,
    asked: JsonMapping,
    *,
    prompt_length: int | None,
    refused: Mapping[str, object],
    progress: "Progress",
    **how: Any,
) -> "DecodingCheck":
    """Check prefill and decode.

    Args:
        target: The model or the job.
        asked: Keys of the job from options and `--set`.
        prompt_length: Value of `--prompt-length`.
        refused: Options that a decoding check does not have, by name, with their values.
        progress: Called with each stage.
        **how: Further arguments of `check_decoding`.

    Raises:
        ConfigError: An option or key belongs to training only.
    """
    from ..checker.check import as_job
    from ..checker.decoding import check_decoding
    from ..errors import ConfigError
    from ..hardware.mesh_sizes import read_mesh

    wrong = [key for key in asked if key not in _ASKED and not key.startswith("model")]
    wrong += [f"--{name}" for name, value in refused.items() if value]
    if wrong:
        raise ConfigError(
            f"--decode checks generation, which has no {', '.join(wrong)}; leave it out, or check "
            "the training step without --decode."
        )
    own = {key: value for key, value in asked.items() if key == "on" or key.startswith("model")}
    mesh = asked.get("mesh")
    return check_decoding(
        as_job(target, own),
        mesh=None if mesh is None else read_mesh(mesh),
        batch_size=int(asked.get("batch_size") or 1),
        context=asked.get("sequence_length"),
        prompt=prompt_length,
        options=asked.get("options"),
        progress=progress,
        **how,
    )


def write_pages(result: "DecodingCheck", html: Path, progress: "Progress") -> None:
    """Write one page per program: decode at `html`, prefill next to it."""
    from ..checker.report import write_html

    beside = html.with_name(f"{html.stem}-prefill{html.suffix}")
    progress(f"wrote {write_html(result.decode.to_report(), html)}")
    progress(f"wrote {write_html(result.prefill.to_report(), beside)}")

"""`check`: whether a job fits and how long a step takes, from the TPU compiler, without a TPU."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..compiler.aot import DEFAULT_TIMEOUT_S, run_request
from ..compiler.compiled import CompiledStep
from ..compiler.memory import MemoryReport
from ..compiler.program.request import CompileRequest
from ..compiler.timeline import StepPrediction
from ..errors import OUT_OF_MEMORY_ADVICE, ConfigError, TPUError
from ..hardware import Slice
from ..job.job import Job
from ..job.reading import read_job
from ..plain_data import JsonMapping
from ..runtime.progress import Progress, silent, watched
from .compiling import compile_job
from .fix import is_thin
from .job_fixes import find_fixes
from .result import CheckResult

NOT_ASKED_FOR = "not asked for"
NOTHING_TO_FIX = "it fits with room to spare: there is nothing to fix"
NO_FIXES = (
    "fixes are proposed for the reference transformers only; for your own model "
    f"{OUT_OF_MEMORY_ADVICE}"
)


def check(
    job: object,
    on: Slice | str | None = None,
    *,
    memory_only: bool = False,
    fix: bool = False,
    timeout_s: float | None = None,
    use_cache: bool = True,
    dump_to: Path | None = None,
    progress: Progress = watched,
    verdict: Callable[[MemoryReport], None] | None = None,
    **changes: Any,
) -> CheckResult:
    """Check a job, or any model, with the real TPU compiler.

    Args:
        job: A `Job`, a job file, a preset, "module:function", a `Workload`, or any model that a
            `Workload` takes.
        on: The slice, e.g. "v6e-8"; it overrides the job's.
        memory_only: Whether to stop after the memory report.
        fix: Whether to prove, each by a compile, changes that make the job fit or leave more memory
            free.
        timeout_s: Time limit of a compile; the job's own by default.
        use_cache: Whether to use and keep cached compiles.
        dump_to: Folder for a copy of every file that the compiler writes.
        progress: Called with each stage as it is reached.
        verdict: Called with the memory report as soon as it is known, before the step is predicted.
        **changes: Keys of the job to change: mesh, batch_size, sequence_length, remat, train, …

    Raises:
        ConfigError: The job is wrong, or names no slice.
        TPUModelError: The model cannot be trained with these settings.
        XLACompilationError: The compiler refused the step, crashed or timed out.

    Example:
        >>> result = tpukit.check("llama3.1-8b", on="v6e-8", batch_size=8)
        >>> result.fits, result.memory.total_bytes, result.prediction.step_time_s
    """
    changes = {**({} if on is None else {"on": str(on)}), **changes}
    resolved = as_job(job, changes)
    compiled = compile_job(
        resolved, timeout_s=timeout_s, use_cache=use_cache, dump_to=dump_to, progress=progress
    )
    result = _judge(
        compiled,
        memory_only=memory_only,
        tokens_per_step=resolved.tokens_per_step if resolved.reads_tokens else None,
        examples_per_step=None if resolved.reads_tokens else resolved.examples,
        model_flops=resolved.model_flops,
        progress=progress,
        verdict=verdict,
    )
    fixes = None
    if fix and not is_thin(result.memory):
        progress(NOTHING_TO_FIX)
    elif fix and resolved.model_flops is None:
        progress(NO_FIXES)
    if resolved.model_flops is not None and is_thin(result.memory):
        fixes = find_fixes(
            resolved,
            result.memory,
            prove=fix,
            timeout_s=timeout_s,
            use_cache=use_cache,
            progress=progress,
        )
    return replace(
        result,
        job=resolved,
        fixes=fixes,
        target=job if isinstance(job, str) else "",
        asked=changes,
    )


def check_request(
    request: CompileRequest,
    *,
    memory_only: bool = False,
    timeout_s: float | None = None,
    use_cache: bool = True,
    dump_to: Path | None = None,
    tokens_per_step: int | None = None,
    progress: Progress = silent,
    verdict: Callable[[MemoryReport], None] | None = None,
) -> CheckResult:
    """Check any jax function, lowered by `make_request`; the settings are those of `check`."""
    compiled = run_request(
        request,
        until="schedule",
        timeout_s=timeout_s or DEFAULT_TIMEOUT_S,
        progress=progress,
        use_cache=use_cache,
        dump_to=dump_to,
    )
    result = _judge(
        compiled,
        memory_only=memory_only,
        tokens_per_step=tokens_per_step,
        progress=progress,
        verdict=verdict,
    )
    return replace(result, options=request.options)


def _judge(
    compiled: CompiledStep,
    *,
    memory_only: bool,
    tokens_per_step: int | None,
    examples_per_step: int | None = None,
    model_flops: float | None = None,
    progress: Progress,
    verdict: Callable[[MemoryReport], None] | None,
) -> CheckResult:
    """Report the memory of a compiled program, and predict its step unless `memory_only` is set."""
    memory = compiled.memory  # raises where the compiler's files do not add up
    if verdict is not None:
        verdict(memory)
    prediction, reason = None, NOT_ASKED_FOR
    if not memory_only:
        prediction, reason = predict(
            compiled,
            tokens_per_step=tokens_per_step,
            examples_per_step=examples_per_step,
            model_flops=model_flops,
            progress=progress,
        )
    return CheckResult(
        compiled=compiled, prediction=prediction, no_prediction=reason, memory_only=memory_only
    )


def as_job(job: object, changes: JsonMapping) -> Job:
    """Return a job, with changes, from a name, a file, a model or another job.

    Raises:
        ConfigError: The job names no slice.
    """
    if isinstance(job, Job):
        found = job.replace(changes) if changes else job
    elif isinstance(job, str | Path):
        found = read_job(str(job), changes)
    else:
        found = Job(model=job).replace(changes)
    if found.on is None:
        raise ConfigError("which slice? Give on='v6e-8' (--on v6e-8, or on: v6e-8 in the job).")
    return found


def predict(
    compiled: CompiledStep,
    *,
    tokens_per_step: int | None = None,
    examples_per_step: int | None = None,
    model_flops: float | None = None,
    one_turn: bool = False,
    progress: Progress = silent,
) -> tuple[StepPrediction | None, str]:
    """Return the predicted step, or None and the reason; see `CompiledStep.predict`."""
    if not compiled.fits:
        return None, "a program that does not fit takes no step"
    try:
        found = compiled.predict(
            tokens_per_step=tokens_per_step,
            model_flops=model_flops,
            one_turn=one_turn,
            progress=progress,
        )
    except TPUError as error:
        return None, str(error)
    return replace(found, examples_per_step=examples_per_step), ""

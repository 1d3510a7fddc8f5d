"""`check`: does a job fit and how long is a step, from the real compiler, on no TPU."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..compiler.aot import DEFAULT_TIMEOUT_S, run_request
from ..compiler.compiled import CompiledStep
from ..compiler.memory import MemoryReport
from ..compiler.program.request import CompileRequest
from ..compiler.timeline import StepPrediction
from ..errors import ConfigError, TPUError
from ..hardware import Slice
from ..job.job import Job
from ..job.reading import read_job
from ..runtime.progress import Progress, silent, watched
from .compiling import compile_job
from .fixes import is_thin
from .fixes.proposing import find_fixes
from .result import CheckResult

NOT_ASKED_FOR = "not asked for"
NOTHING_TO_FIX = "it fits with room to spare: there is nothing to fix"
NO_FIXES = (
    "fixes are known for the reference transformers only; for your own model try remat full, a "
    "smaller batch, or a mesh that splits more"
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
        job: A `Job`, a job file, a preset's name, "module:function", a `Workload`, or any model
            that one takes.
        on: The slice, e.g. "v6e-8"; where the job names one, instead of it.
        memory_only: Whether the verdict on memory is enough.
        fix: Whether to prove what would make it fit, or leave more room where there is little, each
            by a compile.
        timeout_s: Until a compile is killed; the job's own limit by default.
        use_cache: Whether an earlier answer will do, and this one is kept.
        dump_to: A folder that gets a copy of every file the compiler wrote.
        progress: Called with each stage as it is reached.
        verdict: Called with the memory report as soon as it is known, before the step is timed.
        **changes: Keys of the job to change: mesh, batch_size, sequence_length, remat, train, …

    Raises:
        ConfigError: The job is wrong, or names no slice.
        TPUModelError: Nothing trains with these settings.
        XLACompilationError: The compiler refused the step, crashed or ran out of time.

    Example:
        >>> result = tpukit.check("llama3.1-8b", on="v6e-8", batch_size=8)
        >>> result.fits, result.memory.total_bytes, result.prediction.step_time_s
    """
    stated = {**({} if on is None else {"on": str(on)}), **changes}
    whole = as_job(job, stated)
    compiled = compile_job(
        whole, timeout_s=timeout_s, use_cache=use_cache, dump_to=dump_to, progress=progress
    )
    memory = compiled.memory  # what the compiler wrote may turn out not to add up
    if verdict is not None:
        verdict(memory)
    prediction, reason = None, NOT_ASKED_FOR
    if not memory_only:
        prediction, reason = predict(
            compiled,
            tokens_per_step=whole.tokens_per_step if whole.reads_tokens else None,
            examples_per_step=None if whole.reads_tokens else whole.examples,
            model_flops=whole.model_flops,
            progress=progress,
        )
    fixes = None
    if fix and not is_thin(memory):
        progress(NOTHING_TO_FIX)
    elif fix and whole.model_flops is None:
        progress(NO_FIXES)
    if whole.model_flops is not None and is_thin(memory):
        fixes = find_fixes(
            whole, memory, prove=fix, timeout_s=timeout_s, use_cache=use_cache, progress=progress
        )
    return CheckResult(
        compiled=compiled,
        job=whole,
        prediction=prediction,
        no_prediction=reason,
        fixes=fixes,
        memory_only=memory_only,
        target=job if isinstance(job, str) else "",
        asked=stated,
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
    if verdict is not None:
        verdict(compiled.memory)
    prediction, reason = (
        (None, NOT_ASKED_FOR)
        if memory_only
        else predict(compiled, tokens_per_step=tokens_per_step, progress=progress)
    )
    return CheckResult(
        compiled=compiled,
        prediction=prediction,
        no_prediction=reason,
        memory_only=memory_only,
        options=request.options,
    )


def as_job(job: object, changes: Mapping[str, Any]) -> Job:
    """Return the job that a name, a file, a model or a job itself stands for, with changes.

    Raises:
        ConfigError: It names no slice.
    """
    if isinstance(job, Job):
        found = job.replace(changes)
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
    """Return the predicted step, or the reason there is none; see `CompiledStep.predict`."""
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

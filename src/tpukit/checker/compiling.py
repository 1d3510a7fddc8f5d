"""Compile jobs, cached by the job's own key, so that a second check does not import jax."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..compiler.aot import compile_many, load_compiled, run_request
from ..compiler.cache import JOB_LINK, CompileCache
from ..compiler.compiled import CompiledStep, Until
from ..compiler.program.lowered import ProgramFacts
from ..compiler.program.request import CompileRequest, abstract_mesh, make_request
from ..errors import TPUError, TPUModelError
from ..job.compiler_flags import compiler_options
from ..job.job import Job
from ..runtime.progress import Progress, silent


def compile_job(
    job: Job,
    *,
    timeout_s: float | None = None,
    use_cache: bool = True,
    dump_to: Path | None = None,
    progress: Progress = silent,
) -> CompiledStep:
    """Compile a job's training step up to its schedule, or load an earlier compile.

    Args:
        job: The job; its `compile` section has options, time limit and cache size.
        timeout_s: Time limit, in place of `job.compile.compilation_timeout_seconds`.
        use_cache: Whether to use and keep cached compiles.
        dump_to: Folder for a copy of every file that the compiler writes.
        progress: Called with each stage as it is reached.
    """
    known = known_compile(job) if use_cache and dump_to is None else None
    if known is not None:
        return known
    request = lower_job(job, progress=progress, remember=use_cache)
    compiled = run_request(
        request,
        until="schedule",
        timeout_s=timeout_s or job.compile.compilation_timeout_seconds,
        progress=progress,
        use_cache=use_cache,
        dump_to=dump_to,
    )
    if use_cache and job.compile.cache_max_size is not None:
        CompileCache.default().keep_newest(job.compile.cache_max_size)
    return _limited(compiled, job)


def known_compile(job: Job) -> CompiledStep | None:
    """Return the cached compile of a job; None if there is none."""
    if not _has_name(job):
        return None
    cache = CompileCache.default()
    link = cache.load_json(f"{JOB_LINK}{job.key}")
    found = None if link is None else load_compiled(cache, link["key"], until="schedule")
    if link is None or found is None:
        return None
    return _limited(found.seen_as(ProgramFacts.from_dict(link["facts"]), job.slice), job)


def compile_jobs(
    jobs: Sequence[Job],
    *,
    timeout_s: float,
    until: Until = "schedule",
    use_cache: bool = True,
    progress: Progress = silent,
) -> list[CompiledStep | TPUError]:
    """Compile jobs in parallel, and return the result or the error of each.

    Args:
        jobs: The jobs.
        timeout_s: Time limit of each compile.
        until: The last stage that is needed.
        use_cache: Whether to use and keep cached compiles.
        progress: Called with each stage as it is reached.
    """
    answers: dict[int, CompiledStep | TPUError] = {}
    requests: dict[int, CompileRequest] = {}
    for number, job in enumerate(jobs):
        known = known_compile(job) if use_cache else None
        if known is not None:
            answers[number] = known
            continue
        try:
            progress(f"{job.model} on {job.on}: lower")
            requests[number] = lower_job(job, remember=use_cache)
        except TPUError as error:
            answers[number] = error
    compiled = compile_many(
        requests.values(),
        until=until,
        timeout_s=timeout_s,
        use_cache=use_cache,
        progress=progress,
    )
    for number, answer in zip(requests, compiled, strict=True):
        answers[number] = (
            _limited(answer, jobs[number]) if isinstance(answer, CompiledStep) else answer
        )
    return [answers[number] for number in range(len(jobs))]


def lower_job(job: Job, *, progress: Progress = silent, remember: bool = True) -> CompileRequest:
    """Lower a job's training step, and record under the job's key which compile belongs to it."""
    from ..runtime.environment import configure_tpu_environment

    configure_tpu_environment()  # or jax would look for a TPU, slowly, in this process
    from ..hardware.target import target_chip
    from ..job.step import build_step

    with target_chip(job.slice.chip.name):  # which formats have a unit depends on it
        step = build_step(job, values=False)
    for note in step.notes:
        progress(note)
    options = {
        **compiler_options(job.compile, generation=job.slice.chip.name),
        **job.options,
    }
    try:
        request = make_request(
            step.work,
            job.slice,
            mesh=abstract_mesh(job.mesh_sizes),
            dcn_mesh_shape=job.dcn_mesh,
            options=options,
            progress=progress,
        )
    except TPUModelError as error:
        if step.work.batch is not None or job.model_flops is not None:
            raise
        shape = step.work.batch_shapes()["inputs"].shape
        raise TPUModelError(
            f"{error} Nobody said what the model takes, so it got token numbers, int32 of {shape}; "
            "for anything else let the builder return tpukit.Workload(model, batch={…}, loss=…)."
        ) from error
    name = job.to_dict()["model"]
    shown = name if isinstance(name, str) else name["preset"]
    facts = replace(request.program.facts, name=shown)  # every job's function is "step"
    if remember and _has_name(job):
        link = {"key": request.key, "facts": facts.to_dict()}
        CompileCache.default().store_json(f"{JOB_LINK}{job.key}", link)
    return replace(request, program=replace(request.program, facts=facts))


def _has_name(job: Job) -> bool:
    """Whether the job has a cache key; it has none if Python gave it a model or parts."""
    return isinstance(job.model, str) and not job.parts


def _limited(compiled: CompiledStep, job: Job) -> CompiledStep:
    limit = job.memory_limit_bytes
    return compiled if limit is None else compiled.within(limit)

"""A job through the compiler, remembered by the job itself: the second time needs no jax."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..compiler.aot import compile_many, load_compiled, run_request
from ..compiler.cache import JOB_LINK, CompileCache
from ..compiler.compiled import CompiledStep
from ..compiler.program.lowered import ProgramFacts
from ..compiler.program.request import CompileRequest, make_request
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
    """Compile a job's training step up to its schedule, or find what an earlier check left.

    Args:
        job: What to compile; `job.compile` gives options, time and the room of the cache.
        timeout_s: Instead of `job.compile.compilation_timeout_seconds`.
        use_cache: Whether an answer on disk will do, and this one is kept.
        dump_to: A folder that gets a copy of every file the compiler wrote.
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
    """Return what an earlier compile of the same job left."""
    if not _has_name(job):
        return None
    cache = CompileCache.default()
    link = cache.load_json(f"{JOB_LINK}{job.key}")
    found = None if link is None else load_compiled(cache, link["key"], until="schedule")
    if link is None or found is None:
        return None
    return _limited(found.seen_as(ProgramFacts.from_dict(link["facts"]), job.slice), job)


def compile_jobs(
    jobs: Sequence[Job], *, timeout_s: float, progress: Progress = silent
) -> list[CompiledStep | TPUError]:
    """Compile jobs up to their schedules, side by side: for each its result or its error."""
    answers: dict[int, CompiledStep | TPUError] = {}
    requests: dict[int, CompileRequest] = {}
    for number, job in enumerate(jobs):
        known = known_compile(job)
        if known is not None:
            answers[number] = known
            continue
        try:
            progress(f"{job.model} on {job.on}: lower")
            requests[number] = lower_job(job)
        except TPUError as error:
            answers[number] = error
    compiled = compile_many(
        requests.values(), until="schedule", timeout_s=timeout_s, progress=progress
    )
    for number, answer in zip(requests, compiled, strict=True):
        answers[number] = (
            _limited(answer, jobs[number]) if isinstance(answer, CompiledStep) else answer
        )
    return [answers[number] for number in range(len(jobs))]


def lower_job(job: Job, *, progress: Progress = silent, remember: bool = True) -> CompileRequest:
    """Lower a job's training step, and remember which compile answers it."""
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
            mesh=job.mesh_sizes,
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
    """Tell whether the job can be found again: not where Python gave it a model or parts."""
    return isinstance(job.model, str) and not job.parts


def _limited(compiled: CompiledStep, job: Job) -> CompiledStep:
    limit = job.memory_limit_bytes
    return compiled if limit is None else compiled.within(limit)

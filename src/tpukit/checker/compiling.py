"""A plan through the compiler, remembered by the plan itself: the second time needs no jax."""

from collections.abc import Sequence
from dataclasses import replace

from ..compiler.aot import compile_many, load_compiled
from ..compiler.cache import CompileCache
from ..compiler.compiled import CompiledStep
from ..compiler.program.facts import ProgramFacts
from ..compiler.program.request import CompileRequest, make_request
from ..errors import TPUError
from ..job.job import Plan
from ..runtime.progress import Progress, silent


def known_compile(job: Plan) -> CompiledStep | None:
    """What an earlier compile of the same plan left."""
    cache = CompileCache.default()
    link = cache.load_json(f"job-{job.key}")
    found = None if link is None else load_compiled(cache, link["key"], until="schedule")
    if link is None or found is None:
        return None
    return found.seen_as(ProgramFacts.from_dict(link["facts"]), job.target)


def compile_jobs(jobs: Sequence[Plan], *, timeout_s: float) -> list[CompiledStep | TPUError]:
    """Compile plans up to their schedules, side by side: for each its result or its error."""
    answers: dict[int, CompiledStep | TPUError] = {}
    requests: dict[int, CompileRequest] = {}
    for place, job in enumerate(jobs):
        known = known_compile(job)
        if known is not None:
            answers[place] = known
            continue
        try:
            requests[place] = lower_job(job)
        except TPUError as error:
            answers[place] = error
    compiled = compile_many(requests.values(), until="schedule", timeout_s=timeout_s)
    answers.update(zip(requests, compiled, strict=True))
    return [answers[place] for place in range(len(jobs))]


def lower_job(job: Plan, *, progress: Progress = silent, remember: bool = True) -> CompileRequest:
    """Lower a plan's training step, and remember which compile answers it."""
    from ..runtime.environment import configure_tpu_environment

    configure_tpu_environment()  # or jax would look for a TPU, slowly, in this process
    request = make_request(job.workload, job.target, plan=job, progress=progress)
    facts = replace(request.program.facts, name=job.model)  # every job's function is "step"
    if remember:
        link = {"key": request.key, "facts": facts.to_dict()}
        CompileCache.default().store_json(f"job-{job.key}", link)
    return replace(request, program=replace(request.program, facts=facts))

"""Fixes put to the proof: the first of those proposed, each by a compile."""

from dataclasses import replace

from ...compiler.aot import compile_many
from ...compiler.compiled import CompiledStep
from ...compiler.memory import MemoryReport
from ...compiler.program.request import CompileRequest
from ...errors import TPUError
from ...job.job import Job
from ...runtime.progress import Progress, silent
from ..compiling import known_compile, lower_job
from .candidates import JobShape
from .fix import FixList
from .proposing import propose_fixes, rank

FIXES_PROVED = 6


def find_fixes(
    job: Job,
    memory: MemoryReport,
    *,
    prove: bool,
    timeout_s: float | None = None,
    use_cache: bool = True,
    progress: Progress = silent,
) -> FixList:
    """Propose what would make a job fit, or leave more room; with `prove` compile the first."""
    proposed = propose_fixes(JobShape.of(job), memory)
    if not prove:
        return proposed
    tried = list(proposed.fixes[:FIXES_PROVED])
    progress(f"verifying {len(tried)} fixes, each by a compile")
    requests: dict[int, CompileRequest] = {}
    for number, one in enumerate(tried):
        try:
            changed = job.replace(one.changes)
            known = known_compile(changed) if use_cache else None
            if known is not None:
                tried[number] = one.verified(known.memory)
            else:
                requests[number] = lower_job(changed, remember=use_cache)
        except TPUError as error:
            tried[number] = replace(one, failure=str(error))
    answers = compile_many(
        requests.values(),
        until="memory",
        timeout_s=timeout_s or job.compile.compilation_timeout_seconds,
        use_cache=use_cache,
    )
    limit = job.memory_limit_bytes
    for number, answer in zip(requests, answers, strict=True):
        if not isinstance(answer, CompiledStep):
            tried[number] = replace(tried[number], failure=str(answer))
            continue
        within = answer if limit is None else answer.within(limit)
        tried[number] = tried[number].verified(within.memory)
    return rank([*tried, *proposed.fixes[FIXES_PROVED:]])

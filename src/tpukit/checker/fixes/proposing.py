"""Which changes to propose for a job that does not fit, in which order, the first by a compile."""

from dataclasses import replace
from typing import Any

from ...compiler.aot import compile_many
from ...compiler.compiled import CompiledStep
from ...compiler.memory import MemoryReport
from ...compiler.program.request import CompileRequest
from ...errors import TPUError
from ...job.job import Job
from ...runtime.progress import Progress, silent
from ..compiling import known_compile, lower_job
from .candidates import (
    JobShape,
    amount,
    data_over_slices,
    larger_slice,
    more_microbatches,
    other_mesh,
    other_remat,
    smaller_batch,
    smaller_optimizer,
    smaller_weights,
)
from .fix import Fix, FixList

# From the cheapest to live with to the dearest.
_EFFORT = (
    *("donate", "flags", "microbatches", "remat", "jax.checkpoint", "train.moment_dtype"),
    *("train.optimizer", "mesh", "shard", "batch", "batch_size", "train.param_dtype", "on"),
)
THIN_SHARE = 0.05
FIXES_PROVED = 6


def is_thin(report: MemoryReport) -> bool:
    """Whether it does not fit, or fits so closely that a small change may break it."""
    left = report.headroom_bytes
    return not report.fits or (left is not None and left < THIN_SHARE * (report.usable_bytes or 0))


def propose_fixes(shape: JobShape, report: MemoryReport) -> FixList:
    """Every change worth trying: those that should fit first, the cheapest of them first."""
    found = [
        *more_microbatches(shape, report),
        *other_remat(shape, report),
        *smaller_optimizer(shape, report),
        *data_over_slices(shape, report),
        *other_mesh(shape),
        *smaller_batch(shape, report),
        *smaller_weights(shape, report),
        *larger_slice(shape, report),
    ]
    usable = report.usable_bytes
    fixes = [replace(fix, usable_bytes=usable) for fix in found]
    if not any(fix.promising for fix in fixes) and (both := _together(fixes, report)):
        fixes.append(replace(both, usable_bytes=usable))
    return rank(fixes)


def rank(fixes: list[Fix]) -> FixList:
    """Fixes in order: those that fit, by effort; then the unknown; then by how near they come."""

    def order(fix: Fix) -> tuple[int, int, int]:
        size = fix.verified_bytes if fix.verified_bytes is not None else fix.estimate_bytes
        group = 0 if fix.promising else 1 if size is None and not fix.failure else 2
        effort = max(_EFFORT.index(key) for key in fix.changes if key in _EFFORT)
        return group, effort if group < 2 else 0, size or 0

    return FixList(tuple(sorted(fixes, key=order)))


def _together(fixes: list[Fix], report: MemoryReport) -> Fix | None:
    """The largest saving of each kind, all at once."""
    best: dict[str, Fix] = {}
    for fix in fixes:
        key = next(iter(fix.changes))
        if key in ("batch_size", "on") or fix.estimate_bytes is None:
            continue
        if key not in best or fix.estimate_bytes < (best[key].estimate_bytes or 0):
            best[key] = fix
    if len(best) < 2:
        return None
    saved = sum(report.total_bytes - (fix.estimate_bytes or 0) for fix in best.values())
    # Savings of different kinds overlap, so no less is promised than what none of them can touch.
    touched = amount(report, "activations", "temporaries", "optimizer state")
    floor = report.total_bytes - touched - amount(report, "parameters") // 2
    changes: dict[str, Any] = {}
    for fix in best.values():
        changes.update(fix.changes)
    return Fix(
        changes=changes,
        cost="all of these together",
        estimate_bytes=max(floor, report.total_bytes - saved),
    )


def worth_showing(fixes: FixList) -> FixList:
    """Return the fixes without those that arithmetic or a compile found to be too little.

    Where nothing is left, the one that comes nearest stays, to show how far off it is.
    """
    hopeful = tuple(
        fix
        for fix in fixes.fixes
        if fix.promising or (fix.fits is None and not fix.failure and fix.estimate_bytes is None)
    )
    return FixList(hopeful or fixes.fixes[:1])


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
    proposed = worth_showing(propose_fixes(JobShape.of(job), memory))
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
        progress=progress,
    )
    limit = job.memory_limit_bytes
    for number, answer in zip(requests, answers, strict=True):
        if not isinstance(answer, CompiledStep):
            tried[number] = replace(tried[number], failure=str(answer))
            continue
        within = answer if limit is None else answer.within(limit)
        tried[number] = tried[number].verified(within.memory)
    return worth_showing(rank([*tried, *proposed.fixes[FIXES_PROVED:]]))

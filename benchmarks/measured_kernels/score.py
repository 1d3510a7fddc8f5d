"""Compile measured rows and time them as `tpukit kernel bench` times any kernel."""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

from tpukit.compiler.aot import room_for_workers
from tpukit.errors import TPUError, TPUValidationError, did_you_mean
from tpukit.kernels.timing.estimating import time_profile
from tpukit.kernels.timing.profile import profile_kernel
from tpukit.runtime.progress import Counted, Progress, silent

from .programs import program_of
from .report import ScoredRow, TimingsScore
from .rows import MeasuredRow, RowLeftOut, Timings, rows_in_view

ROW_TIMEOUT_S = 900.0
# Two threads that import tokamax at once would deadlock.
_ONE_WRITER = Lock()


def score_timings(
    timings: Timings,
    *,
    ops: Sequence[str] = (),
    chips: Sequence[str] = (),
    limit: int | None = None,
    progress: Progress = silent,
    workers: int | None = None,
    use_cache: bool = True,
) -> TimingsScore:
    """Estimate every measured row that can be rebuilt, beside its measured time.

    Args:
        timings: The rows from `read_timings`.
        ops: Only these ops; all by default.
        chips: Only these generations, by tpukit's names; all by default.
        limit: Cases per op, generation and set of implementations, from the fastest to the slowest;
            all by default.
        progress: Called with each row's result, a `Counted` line.
        workers: Parallel compiles; by default as many as cores and free memory allow.
        use_cache: Whether to read and keep compiles on disk.

    Raises:
        TPUValidationError: There is no row of such an op or generation.
    """
    kept, left_out = newest(_wanted(timings.rows, ops, chips))
    rows = sample(kept, limit)
    in_view = {row.program_key for row in timings.rows if _was_in_view(row)}

    def score_row(row: MeasuredRow) -> ScoredRow | RowLeftOut:
        return _estimate(row, in_view=row.program_key in in_view, use_cache=use_cache)

    results: list[ScoredRow | RowLeftOut] = []
    pool = ThreadPoolExecutor(workers or room_for_workers())
    try:
        for row, result in zip(rows, pool.map(score_row, rows), strict=True):
            results.append(result)
            line = f"{row.describe()}: {_said(result)}"
            progress(Counted(line, done=len(results), total=len(rows)))
    finally:  # an interrupt does not wait for rows that have not started
        pool.shutdown(cancel_futures=True)
    return TimingsScore(
        source=str(timings.path),
        rows_in_file=len(timings.rows) + len(timings.unreadable),
        sampled=limit,
        scored=tuple(result for result in results if isinstance(result, ScoredRow)),
        left_out=(
            *timings.unreadable,
            *left_out,
            *(result for result in results if isinstance(result, RowLeftOut)),
        ),
    )


def newest(rows: Iterable[MeasuredRow]) -> tuple[list[MeasuredRow], list[RowLeftOut]]:
    """Return the newest row of each program, and the older ones as left out.

    Programs are compiled by today's compiler, to which the newest row is nearest.
    """
    programs: dict[str, list[MeasuredRow]] = defaultdict(list)
    for row in rows:
        programs[row.program_key].append(row)
    kept: list[MeasuredRow] = []
    left_out: list[RowLeftOut] = []
    for measured in programs.values():
        *older, last = sorted(measured, key=lambda row: (row.source_date, row.id))
        kept.append(last)
        left_out += [
            RowLeftOut(
                row.id, f"{row.op} as {row.impl}", "the same program was measured again later"
            )
            for row in older
        ]
    return kept, left_out


def sample(rows: Sequence[MeasuredRow], limit: int | None) -> list[MeasuredRow]:
    """Return all rows of some cases per op and generation, evenly from the fastest to the slowest.

    Cases with the same implementations are sampled together, so that cases with both a kernel and
    XLA are included wherever there are any.
    """
    cases: dict[str, list[MeasuredRow]] = defaultdict(list)
    for row in rows:
        cases[row.case_key].append(row)
    strata: dict[tuple[str, str, str], list[list[MeasuredRow]]] = defaultdict(list)
    for measured in cases.values():
        sides = ", ".join(sorted({row.impl for row in measured}))
        strata[measured[0].op, measured[0].device, sides].append(measured)
    chosen: list[MeasuredRow] = []
    for key in sorted(strata):
        ordered = sorted(
            strata[key], key=lambda case: (min(row.measured_us for row in case), case[0].case_key)
        )
        count = len(ordered) if limit is None else min(limit, len(ordered))
        places = sorted({round(i * (len(ordered) - 1) / max(count - 1, 1)) for i in range(count)})
        for place in places:
            chosen += sorted(ordered[place], key=lambda row: row.id)
    return chosen


def _wanted(
    rows: Sequence[MeasuredRow], ops: Sequence[str], chips: Sequence[str]
) -> list[MeasuredRow]:
    known = {row.op for row in rows}
    for op in ops:
        if op not in known:
            raise TPUValidationError(
                f"no row measures {op!r}; the file has {', '.join(sorted(known))}."
                + did_you_mean(op, known)
            )
    wanted = [
        row for row in rows if (not ops or row.op in ops) and (not chips or row.chip in chips)
    ]
    if not wanted:
        measured = {row.device for row in rows}
        raise TPUValidationError(
            f"no row of those ops was measured on {', '.join(chips)}; the file has rows of "
            f"{', '.join(sorted(measured))}."
        )
    return wanted


def _said(result: ScoredRow | RowLeftOut) -> str:
    if isinstance(result, RowLeftOut):
        return f"left out, {result.reason}"
    return f"{result.ratio:.2f} of measured"


def _one_line(reason: str) -> str:
    return " ".join(reason.split()).rstrip(".:")


def _was_in_view(row: MeasuredRow) -> bool:
    return row.id in rows_in_view("kernels" if row.is_pallas else "ops")


def _estimate(row: MeasuredRow, *, in_view: bool, use_cache: bool) -> ScoredRow | RowLeftOut:
    what = f"{row.op} as {row.impl}"
    try:
        with _ONE_WRITER:
            program = program_of(row)
        profile = profile_kernel(
            program.function,
            program.arguments,
            row.device,
            timeout_s=ROW_TIMEOUT_S,
            use_cache=use_cache,
        )
        estimate = time_profile(profile, kind=program.kind)
    except TPUError as error:
        return RowLeftOut(row.id, what, _one_line(str(error)))
    if estimate.time_s is None:
        return RowLeftOut(row.id, what, _one_line(estimate.reason))
    return ScoredRow(
        row=row,
        chip=estimate.chip,
        kind=program.kind,
        estimate_us=estimate.time_s * 1e6,
        low_us=None if estimate.low_s is None else estimate.low_s * 1e6,
        high_us=None if estimate.high_s is None else estimate.high_s * 1e6,
        in_view=in_view,
    )

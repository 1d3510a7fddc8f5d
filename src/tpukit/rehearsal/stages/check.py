"""Check with the TPU compiler: the job, a job that does not fit with its fix, and the stand-in."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from ...checker.check import check
from ...checker.fix import Fix
from ...checker.result import CheckResult
from ...compiler.memory import MemoryReport
from ...errors import TPUOutOfMemoryError, XLACompilationError
from ...hardware.figure import Figure, bytes_text, seconds_text
from ...job.job import Job
from ...plain_data import JsonObject
from ..stage import Beside, Scene, StageResult

FIXES_TRIED = 3
GROWN_AT_MOST, GROWN_TIMES = 1 << 14, 3
LIMIT_WITHIN_S = 90.0
"""Time limit for each compile of a job with a larger batch, which is not essential."""
_CPU_MEMORY = "jax reports no memory of CPU devices"


@dataclass(frozen=True)
class RefusedJob:
    """A job that does not fit, and a fix that the compiler proved.

    Attributes:
        job: As it was compiled.
        memory: Its memory report; None where the compiler refused without one.
        words: What makes it too large, as text.
        fix: The first proposed change that a compile proved; None where none did.
        fixed: The check with the fix.
    """

    job: Job
    memory: MemoryReport | None
    words: str
    fix: Fix | None = None
    fixed: CheckResult | None = None

    @property
    def sentence(self) -> str:
        """What does not fit, and the fix."""
        size = "does not fit"
        if self.memory is not None:
            usable = bytes_text(self.memory.usable_bytes or 0)
            size = f"needs {bytes_text(self.memory.total_bytes)} of {usable}"
        if self.fix is None or self.fixed is None:
            return f"{self.words} {size}; no proposed fix was proved"
        then = bytes_text(self.fixed.memory.total_bytes)
        return f"{self.words} {size}; {self.fix.text} makes it {then}, which fits (compiler)"

    def to_dict(self) -> JsonObject:
        """Return the result as plain data."""
        return {
            "job": self.job.to_dict(),
            "words": self.words,
            "total_bytes": _compiled(self.memory).to_dict(),
            "usable_bytes": None if self.memory is None else self.memory.usable_bytes,
            "fix": None if self.fix is None else self.fix.to_dict(),
            "fixed_bytes": None if self.fixed is None else _compiled(self.fixed.memory).to_dict(),
        }


@dataclass(frozen=True)
class Check(StageResult):
    """The compiler's verdicts.

    Attributes:
        whole: The check of the job that fits: the given one, or the fixed one.
        refused: The job that does not fit: the given one, or one with a larger batch.
        no_refusal: Why there is no such job.
        rehearsed: The check of the stand-in, compiled for its slice.
    """

    whole: CheckResult | None
    refused: RefusedJob | None
    rehearsed: CheckResult
    no_refusal: str = ""
    _facts = ("whole", "refused", "no_refusal", "rehearsed")

    @property
    def is_good(self) -> bool:
        """Whether the job, or the job with its fix, fits."""
        return self.whole is not None and self.whole.fits

    @property
    def sentence(self) -> str:
        """Whether the job fits, its predicted step, and what would not fit."""
        parts: list[str] = []
        if self.refused is not None:
            parts.append(self.refused.sentence)
        elif self.no_refusal:
            parts.append(self.no_refusal)
        if self.whole is not None and self.whole.prediction is not None:
            step = seconds_text(self.whole.prediction.step_time_s)
            parts.append(f"steps of {step} on {self.whole.memory.slice} (model of the schedule)")
        elif self.whole is not None:
            parts.append(f"fits in {bytes_text(self.whole.memory.total_bytes)} (compiler)")
        return "; ".join(parts)

    def beside(self) -> Sequence[Beside]:
        """Return the predicted memory; CPU devices report none."""
        report = self.rehearsed.memory
        return (
            Beside(
                what="memory of one device",
                predicted=_compiled(report),
                predicted_of=f"one device of {report.slice}",
                measured=Figure.missing("B", _CPU_MEMORY),
                is_comparable=False,
                remark=_CPU_MEMORY,
            ),
        )


class CheckStage:
    """Compiles the job for its TPU slice, and finds its memory limit."""

    name: ClassVar[str] = "check"
    question: ClassVar[str] = "Does it fit, by the real TPU compiler, and what if it does not?"

    def run(self, scene: Scene) -> Check:
        """Check the job, a larger one if it fits, and the stand-in."""
        job, why_none = scene.job, ""
        scene.progress(f"the job on {job.slice}")
        first = check(job, progress=scene.progress)
        if first.fits:
            whole: CheckResult | None = first
            try:
                refused = _find_limit(job, first.memory, scene)
            except XLACompilationError as error:  # beyond the limit the compiler can be very slow
                reason = str(error).rstrip(".")
                refused, why_none = None, f"fits, and its limit is not known: {reason}"
        else:
            refused = _find_fix(
                RefusedJob(job, first.memory, "the job as it is"), scene, first, predict=True
            )
            whole = refused.fixed
        scene.progress(f"what is trained here, on {scene.stand_in.job.slice}")
        rehearsed = check(scene.stand_in.job, progress=scene.progress)
        return Check(whole, refused, rehearsed, why_none)


def _find_limit(job: Job, memory: MemoryReport, scene: Scene) -> RefusedJob | None:
    """Return a job whose batch is too large; None where the model's fixes are not known."""
    if job.model_flops is None:
        return None
    times = times_too_many(memory)
    for _ in range(GROWN_TIMES):
        batch = job.examples * times
        words = f"a batch of {batch:,} instead of {job.examples:,}"
        scene.progress(f"{words}: does it still fit?")
        larger = job.replace(batch_size=batch)
        try:
            result = check(
                larger, memory_only=True, timeout_s=LIMIT_WITHIN_S, progress=scene.progress
            )
        except TPUOutOfMemoryError:
            return RefusedJob(larger, None, words)
        if not result.fits:
            beyond = RefusedJob(larger, result.memory, words)
            return _find_fix(beyond, scene, result, predict=False, timeout_s=LIMIT_WITHIN_S)
        times *= 4
    return None


def times_too_many(memory: MemoryReport) -> int:
    """Return the power of two by which a batch must grow to exceed the memory."""
    moving = sum(memory.purposes.get(name, 0) for name in ("activations", "temporaries"))
    usable = memory.usable_bytes or memory.total_bytes
    times = 2
    while times < GROWN_AT_MOST and moving * times < usable:
        times *= 2
    return times


def _find_fix(
    refused: RefusedJob,
    scene: Scene,
    result: CheckResult,
    *,
    predict: bool,
    timeout_s: float | None = None,
) -> RefusedJob:
    """Compile proposed fixes, the most promising first, until one fits."""
    fixes = () if result.fixes is None else result.fixes.fixes
    promising = [fix for fix in fixes if fix.promising or fix.estimate_bytes is None]
    for fix in promising[:FIXES_TRIED]:
        scene.progress(f"would {fix.text} make it fit?")
        tried = check(
            refused.job.replace(fix.changes),
            memory_only=not predict,
            timeout_s=timeout_s,
            progress=scene.progress,
        )
        if tried.fits:
            return RefusedJob(refused.job, refused.memory, refused.words, fix, tried)
    return refused


def _compiled(report: MemoryReport | None) -> Figure:
    if report is None:
        return Figure.missing("B", "the compiler refused it without a report")
    return Figure(report.total_bytes, "B", "compiler", "the compiler's memory report")

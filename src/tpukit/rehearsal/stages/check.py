"""Does it fit, by the real compiler: one that does not, the fix that makes it, and what runs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from ...checker.check import check
from ...checker.fixes import Fix
from ...checker.result import CheckResult
from ...compiler.memory import MemoryReport
from ...errors import TPUOutOfMemoryError, XLACompilationError
from ...hardware.figure import Figure, bytes_text, seconds_text
from ...job.job import Job
from ..beside import Beside
from ..scene import Scene

FIXES_TRIED = 3
GROWN_AT_MOST, GROWN_TIMES = 1 << 14, 3
LIMIT_WITHIN_S = 90.0
"""For each compile of a job that was grown: what it says is good to know, and not needed."""
_CPU_MEMORY = "jax reports no memory of CPU devices"


@dataclass(frozen=True)
class RefusedJob:
    """A job that does not fit, and what the compiler said of fixes.

    Attributes:
        job: As it was compiled.
        memory: What it would take; None where the compiler refused without a report.
        words: What makes it too large.
        fix: The first proposed change that a compile proved; None where none did.
        fixed: That compile.
    """

    job: Job
    memory: MemoryReport | None
    words: str
    fix: Fix | None = None
    fixed: CheckResult | None = None

    @property
    def sentence(self) -> str:
        """What does not fit, and what makes it."""
        size = "does not fit"
        if self.memory is not None:
            usable = bytes_text(self.memory.usable_bytes or 0)
            size = f"needs {bytes_text(self.memory.total_bytes)} of {usable}"
        if self.fix is None or self.fixed is None:
            return f"{self.words} {size}; no proposed fix was proved"
        then = bytes_text(self.fixed.memory.total_bytes)
        return f"{self.words} {size}; {self.fix.text} makes it {then}, which fits (compiler)"

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "job": self.job.to_dict(),
            "words": self.words,
            "total_bytes": _compiled(self.memory).to_dict(),
            "usable_bytes": None if self.memory is None else self.memory.usable_bytes,
            "fix": None if self.fix is None else self.fix.to_dict(),
            "fixed_bytes": None if self.fixed is None else _compiled(self.fixed.memory).to_dict(),
        }


@dataclass(frozen=True)
class Check:
    """What the compiler says.

    Attributes:
        whole: Of the job that fits: as it was given, or fixed.
        refused: The one that does not fit: the job as it was given, or a larger one.
        no_refusal: Why there is none.
        rehearsed: Of what runs here, compiled for its slice.
    """

    whole: CheckResult | None
    refused: RefusedJob | None
    rehearsed: CheckResult
    no_refusal: str = ""

    @property
    def is_good(self) -> bool:
        """Whether the job, or the job with its fix, fits."""
        return self.whole is not None and self.whole.fits

    @property
    def sentence(self) -> str:
        """Whether it fits, how long a step is, and what would not."""
        said: list[str] = []
        if self.refused is not None:
            said.append(self.refused.sentence)
        elif self.no_refusal:
            said.append(self.no_refusal)
        if self.whole is not None and self.whole.prediction is not None:
            step = seconds_text(self.whole.prediction.step_time_s)
            said.append(f"steps of {step} on {self.whole.memory.slice} (model of the schedule)")
        elif self.whole is not None:
            said.append(f"fits in {bytes_text(self.whole.memory.total_bytes)} (compiler)")
        return "; ".join(said)

    def beside(self) -> Sequence[Beside]:
        """Memory, which no CPU device reports."""
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

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "whole": None if self.whole is None else self.whole.to_dict(),
            "refused": None if self.refused is None else self.refused.to_dict(),
            "no_refusal": self.no_refusal,
            "rehearsed": self.rehearsed.to_dict(),
        }


class CheckStage:
    """Asks the TPU compiler, and makes it say no once."""

    name: ClassVar[str] = "check"
    question: ClassVar[str] = "Does it fit, by the real TPU compiler, and what if it does not?"

    def run(self, scene: Scene) -> Check:
        """Check the job; where it fits also a larger one; then what is trained here."""
        job, why_none = scene.job, ""
        scene.progress(f"the job on {job.slice}")
        first = check(job, progress=scene.progress)
        if first.fits:
            whole: CheckResult | None = first
            try:
                refused = _find_limit(job, first.memory, scene)
            except XLACompilationError as error:  # beyond the limit the compiler can be very slow
                said = str(error).rstrip(".")
                refused, why_none = None, f"fits, and where its limit lies is not known: {said}"
        else:
            refused = _find_fix(
                RefusedJob(job, first.memory, "the job as it is"), scene, first, predict=True
            )
            whole = refused.fixed
        scene.progress(f"what is trained here, on {scene.stand_in.job.slice}")
        rehearsed = check(scene.stand_in.job, progress=scene.progress)
        return Check(whole, refused, rehearsed, why_none)


def _find_limit(job: Job, memory: MemoryReport, scene: Scene) -> RefusedJob | None:
    """Grow the batch until the compiler says no; None where fixes are not known for the model."""
    if job.model_flops is None:
        return None
    times = times_too_many(memory)
    for _ in range(GROWN_TIMES):
        batch = job.examples * times
        words = f"a batch of {batch:,} instead of {job.examples:,}"
        scene.progress(f"{words}: does it still fit?")
        larger = job.replace(batch_size=batch)
        try:
            found = check(
                larger, memory_only=True, timeout_s=LIMIT_WITHIN_S, progress=scene.progress
            )
        except TPUOutOfMemoryError:
            return RefusedJob(larger, None, words)
        if not found.fits:
            beyond = RefusedJob(larger, found.memory, words)
            return _find_fix(beyond, scene, found, predict=False, timeout_s=LIMIT_WITHIN_S)
        times *= 4
    return None


def times_too_many(memory: MemoryReport) -> int:
    """Return the power of two by which a batch grows past the limit, by what of it moves."""
    moving = sum(memory.purposes.get(name, 0) for name in ("activations", "temporaries"))
    usable = memory.usable_bytes or memory.total_bytes
    times = 2
    while times < GROWN_AT_MOST and moving * times < usable:
        times *= 2
    return times


def _find_fix(
    refused: RefusedJob,
    scene: Scene,
    found: CheckResult,
    *,
    predict: bool,
    timeout_s: float | None = None,
) -> RefusedJob:
    """Compile proposed fixes, the most promising first, until one fits."""
    fixes = () if found.fixes is None else found.fixes.fixes
    for fix in [one for one in fixes if one.promising or one.estimate_bytes is None][:FIXES_TRIED]:
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

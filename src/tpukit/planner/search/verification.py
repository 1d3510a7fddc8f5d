"""Verification: the best candidates are compiled, and those refused are replaced by the next."""

import itertools
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...checker.compiling import compile_jobs
from ...compiler.compiled import CompiledStep
from ...errors import TPUError, TPUNotAvailableError
from ...hardware import Slice
from ...hardware.figure import format_quantity
from ...hardware.mesh_sizes import write_mesh
from ...job.job import Job
from ...runtime.progress import Progress
from ..answer.amounts import days_text
from ..answer.choice import Choice, Verified
from .objectives import ObjectiveName, PlanLimits
from .search import Search

SMALL_DIFFERENCE = 0.10  # between model and compiler, not reported

Compile = Callable[..., "Sequence[CompiledStep | TPUError]"]


@dataclass
class Verifier:
    """Compiles candidates until enough are confirmed or the time is up.

    Attributes:
        budget_s: No compile starts after so long, and none runs longer than what is left.
        progress: Called with a line before each compile.
        compile: What compiles plans, side by side.
        seconds: How long it all took.
        notes: Where model and compiler differ.
        late: Choices that fit, and by the compiled schedule miss a limit.
        dropped: Slices of which the compiler left nothing.
    """

    budget_s: float
    progress: Progress
    compile: Compile = compile_jobs
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list[str])
    late: list[Choice] = field(default_factory=list[Choice])
    dropped: set[Slice] = field(default_factory=set[Slice])
    _started: float = 0.0
    _answers: dict[str, Verified] = field(default_factory=dict[str, Verified])
    _correction: dict[tuple[str, int], float] = field(default_factory=dict[tuple[str, int], float])

    def best(
        self, search: Search, order: np.ndarray, *, top: int, verify: int, limits: PlanLimits
    ) -> list[Choice]:
        """The first `top` choices of different slices, the first `verify` of them confirmed.

        A candidate the compiler refuses makes room for the next of its slice that the corrected
        model expects to fit, and a slice without one for the next slice. Where another mesh comes
        close by the model, both are compiled, and the faster is kept. Choices after the confirmed
        ones are corrected by what these took over the model: all figures are of one kind.
        """
        self._started = time.perf_counter()
        firsts = list(search.best_of_each_slice(order))
        rivals = {first: search.rival(order, first) for first in firsts[:verify]}
        self._compile([search.choice(index).job for index in firsts[:verify]])
        close = [index for index in rivals.values() if index is not None]
        self._compile([search.choice(index).job for index in close])
        confirmed: list[Choice] = []
        further = iter(firsts)
        for first in further:
            kept = self._confirm(search, order, first)
            if kept is None:
                self.dropped.add(search.slice(first))
                continue
            kept = self._faster(search, kept, rivals.get(first))
            broken = broken_limit(kept, limits)
            if broken:
                self.notes.append(f"{kept.slice}: {broken} by the compiled schedule")
                self.dropped.add(kept.slice)
                self.late.append(kept)
                continue
            confirmed.append(kept)
            if len(confirmed) == min(verify, top):
                break
        self.seconds = time.perf_counter() - self._started
        objective = search.ask.objective
        confirmed.sort(key=lambda choice: sort_key(objective, choice))
        rest = (self.corrected(search.choice(first), confirmed) for first in further)
        passed = (choice for choice in rest if not broken_limit(choice, limits))
        return [*confirmed, *itertools.islice(passed, top - len(confirmed))]

    @staticmethod
    def corrected(choice: Choice, confirmed: Sequence[Choice]) -> Choice:
        """A choice that was not compiled, as much slower as compiled ones are than their model.

        With the upper median of these, none that the model ranks after the compiled ones gets
        ahead of the best of them.
        """
        ratios = [one.step_time_s / one.modelled_step_s for one in confirmed if is_compiled(one)]
        return choice.corrected(statistics.median_high(ratios)) if ratios else choice

    def _confirm(self, search: Search, order: np.ndarray, first: int) -> Choice | None:
        """Try candidates of one slice from `first` on; the first that the compiler confirms."""
        on = search.slice(first)
        for index in (first, *map(int, order)):
            if search.slice(index) != on or not self._expected_to_fit(search, index):
                continue
            choice = search.choice(index)
            verified = self._verdict(choice.job)
            if verified is None:
                reason = f"not verified: {self.budget_s:g} s were used up"
                return choice.with_verified(Verified(fits=True, reason=reason))
            self._learn(search, index, verified)
            self.notes += disagreement(choice, verified)
            if verified.fits:
                return choice.with_verified(verified)
        return None

    def _faster(self, search: Search, kept: Choice, rival: int | None) -> Choice:
        """The better of two meshes by their compiled schedules."""
        if rival is None:
            return kept
        choice = search.choice(rival)
        verified = self._answers.get(_name(choice.job))
        if verified is None or not verified.fits or not verified.step_time_s:
            return kept
        other, objective = choice.with_verified(verified), search.ask.objective
        if sort_key(objective, other) >= sort_key(objective, kept):
            return kept
        self.notes.append(
            f"{kept.slice}: the model prefers {write_mesh(kept.job.mesh_sizes)}, "
            f"the compiled schedule {write_mesh(other.job.mesh_sizes)}"
        )
        return other

    def _verdict(self, job: Job) -> Verified | None:
        """The compiler's result for a job; None when there is no time left to compile it."""
        if _name(job) not in self._answers:
            self._compile([job])
        return self._answers.get(_name(job))

    def _compile(self, jobs: Sequence[Job]) -> None:
        left = self.budget_s - (time.perf_counter() - self._started)
        if left <= 0 or not jobs:
            return
        for job in jobs:
            how = f"{write_mesh(job.mesh_sizes)} batch {job.examples} remat {job.remat}"
            self.progress(f"compiling {job.on} {how}")
        answers = self.compile(jobs, timeout_s=left, progress=self.progress)
        for job, answer in zip(jobs, answers, strict=True):
            self._answers[_name(job)] = _verified(job, answer, self.progress)

    def _expected_to_fit(self, search: Search, index: int) -> bool:
        """Whether it still fits once the model's memory is corrected by earlier compiles."""
        ratio = self._correction.get(_kind(search, index), 1.0)
        return float(search.scores.memory_share[index]) * ratio <= 1.0

    def _learn(self, search: Search, index: int, verified: Verified) -> None:
        """Remember by how much the compiler differed, for similar candidates."""
        kind = _kind(search, index)
        if verified.memory_bytes is None:
            self._correction[kind] = np.inf  # refused for another reason: similar ones will be
            return
        ratio = verified.memory_bytes / float(search.scores.memory.total[index])
        share = float(search.scores.memory_share[index])
        # What did not fit must not be expected to fit again, however the two limits are rounded.
        self._correction[kind] = ratio if verified.fits else max(ratio, 1.001 / share)


def is_compiled(choice: Choice) -> bool:
    """Whether its step is that of a compiled schedule."""
    return choice.verified is not None and bool(choice.verified.step_time_s)


def _name(job: Job) -> str:
    return json.dumps(job.to_dict(), sort_keys=True)


def _verified(job: Job, answer: CompiledStep | TPUError, progress: Progress) -> Verified:
    if isinstance(answer, TPUNotAvailableError):
        raise answer
    if isinstance(answer, TPUError):
        return Verified(fits=False, reason=str(answer))
    memory = answer.memory.total_bytes
    if not answer.fits:
        return Verified(fits=False, memory_bytes=memory)
    try:
        step = answer.predict(
            tokens_per_step=job.tokens_per_step,
            progress=lambda line: progress(f"{answer.name} on {job.on}: {line}"),
        )
    except TPUError as error:
        return Verified(fits=True, memory_bytes=memory, reason=str(error))
    caveats = " ".join(step.caveats)
    return Verified(fits=True, memory_bytes=memory, step_time_s=step.step_time_s, reason=caveats)


def _kind(search: Search, index: int) -> tuple[str, int]:
    """What candidates share whose memory the model misjudges in the same way."""
    candidates = search.scores.candidates
    axes = ",".join(candidates.meshes[candidates.mesh[index]].joined_sizes)
    return f"{search.slice(index).chip.name} {axes}", int(candidates.remat[index])


def sort_key(objective: ObjectiveName, choice: Choice) -> tuple[float, float]:
    """What choices are sorted by, once their times are the compiler's."""
    money = choice.chip_hours if choice.usd.value is None else choice.usd.value
    if objective == "fewest-chips":
        return float(choice.slice.chips), choice.days
    return (choice.days, money) if objective == "fastest" else (money, choice.days)


def broken_limit(choice: Choice, limits: PlanLimits) -> str:
    """The limit that a choice breaks once its step is known, as text; "" when none."""
    if choice.waste == 1.0:
        return "never finishes on spot"
    if limits.deadline_days is not None and choice.days > limits.deadline_days:
        return f"{days_text(choice.days)}, {days_text(limits.deadline_days)} asked,"
    if limits.budget_usd is not None and (choice.usd.value or 0.0) > limits.budget_usd:
        return f"{choice.usd.text}, ${limits.budget_usd:,.0f} asked,"
    return ""


def disagreement(choice: Choice, verified: Verified) -> list[str]:
    """Where model and compiler differ by more than `SMALL_DIFFERENCE`, or the step does not fit."""
    what = f"{choice.slice} {choice.mesh} remat {choice.remat}, batch {choice.batch_size:,}"
    if verified.memory_bytes is None:
        return [f"{what}: the compiler refused it: {verified.reason}"]
    modelled = choice.memory["total"]
    ratio = verified.memory_bytes / modelled - 1
    notes: list[str] = []
    if not verified.fits or abs(ratio) > SMALL_DIFFERENCE:
        verdict = "" if verified.fits else ", which does not fit"
        notes.append(
            f"{what}: {format_quantity(modelled, 'B')} by the model, "
            f"{format_quantity(verified.memory_bytes, 'B')} by the compiler ({ratio:+.0%}){verdict}"
        )
    if verified.step_time_s:
        change = verified.step_time_s / choice.step_time_s - 1
        if abs(change) > SMALL_DIFFERENCE:
            notes.append(
                f"{what}: a step of {choice.step_time_s:.4g} s by the model, "
                f"{verified.step_time_s:.4g} s by the compiled schedule ({change:+.0%})"
            )
    return notes

"""Compile the best candidates, or a user's model for one slice after another."""

import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ...checker.compiling import compile_jobs
from ...checker.host_memory import host_memory
from ...compiler.compiled import CompiledStep
from ...errors import TPUError, TPUNotAvailableError
from ...hardware import Slice
from ...hardware.figure import format_quantity
from ...hardware.mesh_sizes import write_mesh
from ...job.job import Job
from ...runtime.progress import Progress
from ...runtime.ranges import COUNT
from ..amounts import days_text
from ..cost.memory_model import split_of
from ..cost.money import SPOT, host_bytes_per_s
from ..cost.step_variant import CAUSES
from .choice import Choice, Verified
from .objectives import ObjectiveName, PlanLimits
from .search import Ask, Search, optimizer_settings

SMALL_DIFFERENCE = 0.10  # between model and compiler, not reported

Compile = Callable[..., "Sequence[CompiledStep | TPUError]"]


@dataclass
class Verifier:
    """Compiles candidates until enough are confirmed or the time is up.

    Attributes:
        budget_s: No compile starts after this time, and none runs longer than the rest of it.
        progress: Called with a line before each compile.
        compile: Compiles jobs in parallel.
        seconds: Total time.
        notes: Differences between the model and the compiler.
        late: Choices that fit but miss a limit by their compiled schedule.
        dropped: Slices without a candidate that the compiler confirmed.
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
        """Return `top` choices of different slices; the first `verify` are confirmed by a compile.

        If the compiler refuses a candidate, the next of its slice that should fit by the corrected
        model is tried, and then the next slice. If another mesh is close by the model, both are
        compiled and the faster is kept. Choices that were not compiled are corrected by the ratio
        of compiled to modelled time, so that all figures are comparable.
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
        """Return a choice that was not compiled, corrected by the ratios of compiled choices.

        With the upper median of the ratios, no uncompiled choice overtakes the best compiled one.
        """
        ratios = [one.step_time_s / one.modelled_step_s for one in confirmed if is_compiled(one)]
        return choice.corrected(statistics.median_high(ratios)) if ratios else choice

    def _confirm(self, search: Search, order: np.ndarray, first: int) -> Choice | None:
        """Return the first candidate of a slice, from `first` on, that the compiler confirms."""
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
        """Return the better of two meshes by their compiled schedules."""
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
        """Return the compiler's result for a job; None if no time is left to compile it."""
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
        """Whether a candidate fits after its modelled memory is corrected by earlier compiles."""
        ratio = self._correction.get(_kind(search, index), 1.0)
        return float(search.scores.memory_share[index]) * ratio <= 1.0

    def _learn(self, search: Search, index: int, verified: Verified) -> None:
        """Record the ratio of compiled to modelled memory for similar candidates."""
        kind = _kind(search, index)
        if verified.memory_bytes is None:
            self._correction[kind] = np.inf  # refused for another reason: similar ones will be
            return
        ratio = verified.memory_bytes / float(search.scores.memory.total[index])
        share = float(search.scores.memory_share[index])
        # A candidate that did not fit must not be expected to fit again because of rounding.
        self._correction[kind] = ratio if verified.fits else max(ratio, 1.001 / share)


def is_compiled(choice: Choice) -> bool:
    """Whether the step time of a choice comes from a compiled schedule."""
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
    """Return what candidates have in common whose memory the model misjudges alike."""
    candidates = search.scores.candidates
    axes = ",".join(candidates.meshes[candidates.mesh[index]].joined_sizes)
    return f"{search.slice(index).chip.name} {axes}", int(candidates.remat[index])


def sort_key(objective: ObjectiveName, choice: Choice) -> tuple[float, float]:
    """Return the sort key of choices after verification."""
    money = choice.chip_hours if choice.usd.value is None else choice.usd.value
    if objective == "fewest-chips":
        return float(choice.slice.chips), choice.days
    return (choice.days, money) if objective == "fastest" else (money, choice.days)


def broken_limit(choice: Choice, limits: PlanLimits) -> str:
    """Return the limit that a choice breaks, as text; "" if it breaks none."""
    if choice.waste == 1.0:
        return "never finishes on spot"
    if limits.deadline_days is not None and choice.days > limits.deadline_days:
        return f"{days_text(choice.days)}, {days_text(limits.deadline_days)} asked,"
    if limits.budget_usd is not None and (choice.usd.value or 0.0) > limits.budget_usd:
        return f"{choice.usd.text}, ${limits.budget_usd:,.0f} asked,"
    return ""


def disagreement(choice: Choice, verified: Verified) -> list[str]:
    """Return notes where model and compiler differ by more than `SMALL_DIFFERENCE`."""
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


AT_ONCE = 2  # compiles side by side before the clock is looked at again
_REFUSED = "the compiler refused it"
_CAUSES = {"kernel": "attention", "vector": "hbm", "overhead": "hbm"}


@dataclass
class OwnModelSearch:
    """Compiles a user's step for one slice after another, each with one `fsdp` axis.

    Attributes:
        budget_s: No compile starts after this time.
        progress: Called with a line before each compile.
        notes: Slices that do not work, and why.
    """

    ask: Ask
    budget_s: float
    progress: Progress
    compile: Compile = compile_jobs
    compiled: int = 0
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list[str])

    def choices(self) -> tuple[list[Choice], str]:
        """Return choices that meet the limits, or else all that fit and the reason."""
        started = time.perf_counter()
        found: list[Choice] = []
        waiting = list(self._jobs())
        skipped = 0
        while waiting:
            left = self.budget_s - (time.perf_counter() - started)
            if left <= 0:
                skipped = len(waiting)
                break
            now, waiting = waiting[:AT_ONCE], waiting[AT_ONCE:]
            self.progress(f"compiling for {', '.join(str(job.on) for job in now)}")
            answers = self.compile(now, timeout_s=left, progress=self.progress)
            for job, answer in zip(now, answers, strict=True):
                self.compiled += 1
                found += self._read(job, answer)
        if skipped:
            self.notes.append(f"{skipped} slices were not asked about: time was up")
        self.seconds = time.perf_counter() - started
        found.sort(key=lambda choice: sort_key(self.ask.objective, choice))
        passed = [choice for choice in found if not broken_limit(choice, self.ask.limits)]
        if passed:
            return passed, ""
        if not found:
            refused = next((note for note in self.notes if _REFUSED in note), "")
            return [], refused or "no slice that its batch can be split over holds it"
        return found, f"every slice that holds it breaks a limit: {self._nearest(found[0])}"

    def _nearest(self, choice: Choice) -> str:
        limits: PlanLimits = self.ask.limits
        return f"{choice.slice}: {broken_limit(choice, limits).rstrip(',')}"

    def _jobs(self) -> Iterator[Job]:
        """Yield a job for every slice that the batch can be split over, the smallest first."""
        subject, optimizer = self.ask.subject, self.ask.space.optimizers[0]
        where = [one for one in self.ask.space.slices if one.num_slices == 1]
        for on in sorted(where, key=lambda one: one.chips):
            examples = subject.fixed_examples or on.devices  # one a device, where nobody said
            if examples % on.devices == 0:
                yield subject.job.replace(
                    on=str(on),
                    mesh={"fsdp": -1},
                    batch_size=examples,
                    sequence_length=subject.sequence_length,
                    remat=subject.remat,
                    train={**optimizer_settings(optimizer), **subject.fine_tuning},
                )

    def _read(self, job: Job, answer: CompiledStep | TPUError) -> list[Choice]:
        if isinstance(answer, TPUNotAvailableError):
            raise answer
        if isinstance(answer, TPUError):
            self.notes.append(f"{job.on}: {_REFUSED}: {answer}")
            return []
        memory = answer.memory
        usable = float(memory.usable_bytes or math.inf)
        if not answer.fits or memory.total_bytes > usable * (1 - self.ask.limits.min_headroom):
            self.notes.append(f"{job.on}: {memory.verdict}")
            return []
        hosts = host_memory(job, answer)
        if hosts is not None and hosts.fits is False:
            self.notes.append(f"{job.on}: {hosts.verdict}")
            return []
        step = answer.predict(
            tokens_per_step=job.tokens_per_step,
            progress=lambda line: self.progress(f"{answer.name} on {job.on}: {line}"),
        )
        return [self._choice(job, memory, step)]

    def _choice(self, job: Job, memory: Any, step: Any) -> Choice:
        ask, on = self.ask, job.slice
        purposes = split_of(memory).to_dict()
        causes: dict[str, float] = dict.fromkeys(CAUSES, 0.0)
        spent: dict[str, float] = step.seconds_by_cause
        for name, seconds in spent.items():
            causes[_CAUSES.get(name, name)] += seconds
        steps = math.ceil(ask.tokens / job.tokens_per_step)
        state = purposes["weights"] + purposes["optimizer"]  # of one device; all are split alike
        quote, region = ask.market.quote(on)
        return Choice(
            job=job.replace(
                {"launch": ask.market.launch_terms(on)},
                **({"train.steps": steps} if steps in COUNT else {}),
            ),
            precision="bf16",
            memory={**purposes, "total": float(memory.total_bytes)},
            usable_bytes=float(memory.usable_bytes or 0),
            modelled_step_s=step.step_time_s,
            seconds_by_cause=causes,
            steps=steps,
            model_flops=None,
            usd_per_chip_hour=quote,
            region=region,
            preemption=ask.market.preemption if ask.market.tier == SPOT else None,
            save_s=state / host_bytes_per_s(on),
            write_s=ask.market.preemption.write_s(state * on.devices),
            verified=Verified(
                fits=True,
                memory_bytes=memory.total_bytes,
                step_time_s=step.step_time_s,
                reason=" ".join(step.caveats),
            ),
        ).corrected(1.0)

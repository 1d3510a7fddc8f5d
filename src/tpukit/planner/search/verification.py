"""The compiler's word on the best candidates; what it refuses is replaced by the next."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ...checker.compiling import compile_jobs
from ...compiler.compiled import CompiledStep
from ...errors import TPUError, TPUNotAvailableError
from ...hardware.figure import format_quantity
from ...job.job import Job
from ...runtime.progress import Progress
from ..answer.amounts import days_text
from ..answer.choice import Choice, Verified
from .objectives import Limits, ObjectiveName
from .search import Search

NOT_WORTH_A_WORD = 0.10  # a model this close to the compiler agrees with it

Compile = Callable[..., "Sequence[CompiledStep | TPUError]"]


@dataclass
class Verifier:
    """Compiles candidates until enough are confirmed or the time is up.

    Attributes:
        budget_s: No compile starts after so long, and none runs longer than what is left.
        progress: Called with a line for each thing that is done.
        compile: What compiles plans, side by side.
        seconds: How long it all took.
        notes: What model and compiler say differently.
        late: Choices that fit, and by the compiled schedule miss a limit.
    """

    budget_s: float
    progress: Progress
    compile: Compile = compile_jobs
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list[str])
    late: list[Choice] = field(default_factory=list[Choice])
    _started: float = 0.0
    _answers: dict[str, Verified] = field(default_factory=dict[str, Verified])
    _correction: dict[tuple[str, int], float] = field(default_factory=dict[tuple[str, int], float])

    def best(
        self, search: Search, order: np.ndarray, *, top: int, verify: int, limits: Limits
    ) -> list[Choice]:
        """The first `top` choices of different slices, the first `verify` of them confirmed.

        A candidate the compiler refuses makes room for the next of its slice that the corrected
        model still believes in, and a slice without one for the next slice. Where another mesh
        comes close by the model, both are compiled, and the faster one stands.
        """
        self._started = time.perf_counter()
        firsts = list(search.best_of_each_slice(order))
        rivals = {first: search.rival(order, first) for first in firsts[:verify]}
        self._compile([search.choice(place).job for place in firsts[:verify]])
        close = [place for place in rivals.values() if place is not None]
        self._compile([search.choice(place).job for place in close])
        confirmed: list[Choice] = []
        rest: list[Choice] = []
        for first in firsts:
            if len(confirmed) + len(rest) == top:
                break
            if len(confirmed) == verify:
                rest.append(search.choice(first))
                continue
            stands = self._confirm(search, order, first)
            if stands is None:
                continue
            stands = self._faster(search, stands, rivals.get(first))
            broken = broken_limit(stands, limits)
            if broken:
                self.notes.append(f"{stands.target}: {broken} by the compiled schedule")
                self.late.append(stands)
            else:
                confirmed.append(stands)
        self.seconds = time.perf_counter() - self._started
        objective = search.ask.objective
        return sorted(confirmed, key=lambda choice: sort_key(objective, choice)) + rest

    def _confirm(self, search: Search, order: np.ndarray, first: int) -> Choice | None:
        """Try candidates of one slice from `first` on; the one that stands."""
        target = search.target(first)
        for place in (first, *map(int, order)):
            if search.target(place) != target or not self._believed(search, place):
                continue
            choice = search.choice(place)
            verified = self._verdict(choice.job)
            if verified is None:
                reason = f"not verified: {self.budget_s:g} s were used up"
                return choice.with_verified(Verified(fits=True, reason=reason))
            self._learn(search, place, verified)
            self.notes += disagreement(choice, verified)
            if verified.fits:
                return choice.with_verified(verified)
        return None

    def _faster(self, search: Search, stands: Choice, rival: int | None) -> Choice:
        """The better of two meshes by their compiled schedules."""
        if rival is None:
            return stands
        choice = search.choice(rival)
        verified = self._answers.get(_name(choice.job))
        if verified is None or not verified.fits or not verified.step_time_s:
            return stands
        other, objective = choice.with_verified(verified), search.ask.objective
        if sort_key(objective, other) >= sort_key(objective, stands):
            return stands
        self.notes.append(
            f"{stands.target}: the model prefers {_mesh(stands.job)}, the compiled schedule "
            f"{_mesh(other.job)}"
        )
        return other

    def _verdict(self, job: Job) -> Verified | None:
        """What the compiler says of a job; None when there is no time left to ask it."""
        if _name(job) not in self._answers:
            self._compile([job])
        return self._answers.get(_name(job))

    def _compile(self, jobs: Sequence[Job]) -> None:
        left = self.budget_s - (time.perf_counter() - self._started)
        if left <= 0 or not jobs:
            return
        for job in jobs:
            how = f"{_mesh(job)} batch {job.examples} remat {job.remat}"
            self.progress(f"compiling {job.on} {how}")
        answers = self.compile(jobs, timeout_s=left)
        for job, answer in zip(jobs, answers, strict=True):
            self._answers[_name(job)] = _verified(job, answer)

    def _believed(self, search: Search, place: int) -> bool:
        """Whether it still fits once the model's memory is corrected by what was learnt."""
        ratio = self._correction.get(_kind(search, place), 1.0)
        return float(search.scores.memory_share[place]) * ratio <= 1.0

    def _learn(self, search: Search, place: int, verified: Verified) -> None:
        """Remember by how much the compiler differed, for candidates of the same kind."""
        kind = _kind(search, place)
        if verified.memory_bytes is None:
            self._correction[kind] = np.inf  # refused for another reason: so are its like
            return
        seen = verified.memory_bytes / float(search.scores.memory.total[place])
        share = float(search.scores.memory_share[place])
        # What did not fit must not be believed again, whatever the two limits' rounding says.
        self._correction[kind] = seen if verified.fits else max(seen, 1.001 / share)


def _mesh(job: Job) -> str:
    return ",".join(f"{axis}={size}" for axis, size in job.mesh.items())


def _name(job: Job) -> str:
    return json.dumps(job.to_dict(), sort_keys=True)


def _verified(job: Job, answer: CompiledStep | TPUError) -> Verified:
    if isinstance(answer, TPUNotAvailableError):
        raise answer
    if isinstance(answer, TPUError):
        return Verified(fits=False, reason=str(answer))
    memory = answer.memory.total_bytes
    if not answer.fits:
        return Verified(fits=False, memory_bytes=memory)
    try:
        step = answer.predict(tokens_per_step=job.tokens_per_step)
    except TPUError as error:
        return Verified(fits=True, memory_bytes=memory, reason=str(error))
    caveats = " ".join(step.caveats)
    return Verified(fits=True, memory_bytes=memory, step_time_s=step.step_time_s, reason=caveats)


def _kind(search: Search, place: int) -> tuple[str, int]:
    """Candidates whose memory the model gets wrong alike."""
    candidates = search.scores.candidates
    axes = ",".join(candidates.meshes[candidates.mesh[place]].joined_sizes)
    return f"{search.target(place).chip.name} {axes}", int(candidates.remat[place])


def sort_key(objective: ObjectiveName, choice: Choice) -> tuple[float, float]:
    """What choices are sorted by, once their times are the compiler's."""
    money = choice.chip_hours if choice.usd.value is None else choice.usd.value
    if objective == "fewest-chips":
        return float(choice.target.chips), choice.days
    return (choice.days, money) if objective == "fastest" else (money, choice.days)


def broken_limit(choice: Choice, limits: Limits) -> str:
    """Which limit the compiled schedule breaks, in words; "" when none."""
    if limits.deadline_days is not None and choice.days > limits.deadline_days:
        return f"{days_text(choice.days)}, {days_text(limits.deadline_days)} asked,"
    if limits.budget_usd is not None and (choice.usd.value or 0.0) > limits.budget_usd:
        return f"{choice.usd.text}, ${limits.budget_usd:,.0f} asked,"
    return ""


def disagreement(choice: Choice, verified: Verified) -> list[str]:
    """What model and compiler say differently of one candidate, worth a word or not fitting."""
    what = f"{choice.target} {choice.mesh} remat {choice.remat}, batch {choice.batch_size:,}"
    if verified.memory_bytes is None:
        return [f"{what}: the compiler refused it: {verified.reason}"]
    modelled = choice.memory["total"]
    ratio = verified.memory_bytes / modelled - 1
    notes: list[str] = []
    if not verified.fits or abs(ratio) > NOT_WORTH_A_WORD:
        verdict = "" if verified.fits else ", which does not fit"
        notes.append(
            f"{what}: {format_quantity(modelled, 'B')} by the model, "
            f"{format_quantity(verified.memory_bytes, 'B')} by the compiler ({ratio:+.0%}){verdict}"
        )
    if verified.step_time_s:
        change = verified.step_time_s / choice.step_time_s - 1
        if abs(change) > NOT_WORTH_A_WORD:
            notes.append(
                f"{what}: a step of {choice.step_time_s:.4g} s by the model, "
                f"{verified.step_time_s:.4g} s by the compiled schedule ({change:+.0%})"
            )
    return notes

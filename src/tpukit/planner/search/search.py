"""Score every candidate, test it against the limits, and rank those that pass."""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from ...hardware import Slice
from ...hardware.formats import spelled_as
from ...hardware.mesh_sizes import refill_mesh
from ...hardware.rates import Accuracy
from ...models.transformer.config import OPERANDS
from ...plain_data import JsonObject
from ...runtime.ranges import COUNT
from ...step.optimizer_spec import OptimizerSpec
from ..amounts import days_text
from ..cost.candidates import PRECISIONS, Space, enumerate_candidates
from ..cost.money import SPOT, Costs, Market, cost_of
from ..cost.scoring import Scores, score
from ..cost.step_variant import variant_for
from .choice import Choice
from .objectives import (
    Judgement,
    ObjectiveName,
    PlanLimits,
    bins,
    judge,
    pareto_front,
    ranked,
    unusual,
    usual_chips,
)
from .rejections import Rejection, find_rejections, why_never
from .subject import PlannedModel

# On small slices the compiler splits matmuls with gathered weights and sums the parts through HBM.
# A step of llama3.1-8b on v6e-16 then takes 4.13 s instead of 2.90 s.
_WHOLE_PRODUCTS = {"xla_jf_spmd_threshold_for_windowed_einsum_mib": 1_000_000}


@dataclass(frozen=True, kw_only=True)
class Ask:
    """The request of a plan.

    Attributes:
        max_batch_tokens: Most tokens per step; in larger steps each token teaches less.
        any_chips: Whether slices of any size may be chosen; otherwise up to `usual_chips`.
    """

    subject: PlannedModel
    tokens: float
    objective: ObjectiveName
    limits: PlanLimits
    space: Space
    market: Market
    max_batch_tokens: float
    any_chips: bool = True


@dataclass(frozen=True)
class Search:
    """All candidates of a request, scored and judged."""

    ask: Ask
    scores: Scores
    costs: Costs
    verdicts: Judgement
    seconds: float

    @classmethod
    def run(cls, ask: Ask) -> "Search":
        """Score and judge all candidates of a request."""
        started = time.perf_counter()
        subject = ask.subject
        candidates = enumerate_candidates(
            subject.shape,
            ask.space,
            sequence_length=subject.sequence_length,
            max_batch_tokens=ask.max_batch_tokens,
            fixed_examples=subject.fixed_examples,
        )
        scores = score(
            subject.shape,
            candidates,
            sequence_length=subject.sequence_length,
            variant=variant_for(subject.config.matmul),
        )
        costs = cost_of(scores, ask.market, tokens=ask.tokens)
        verdicts = judge(scores, costs, ask.limits)
        return cls(ask, scores, costs, verdicts, time.perf_counter() - started)

    @property
    def priced(self) -> bool:
        """Whether a candidate that passes has a price; otherwise chip-hours are compared."""
        return bool((self.verdicts.passed & self.costs.priced).any())

    @cached_property
    def most_chips(self) -> int | None:
        """The most chips of a choice if only a budget was given; None for any number."""
        passed = np.flatnonzero(self.verdicts.passed)
        if self.ask.any_chips or not len(passed):
            return None
        return usual_chips(self.scores.candidates.chips[passed], self.costs.days[passed])

    def order(
        self, *, passed: np.ndarray | None = None, most_chips: int | None = None
    ) -> np.ndarray:
        """Return indices of candidates, best first; the cheapest always has a price."""
        chosen = self.verdicts.passed if passed is None else passed
        if most_chips is not None:
            chosen = chosen & (self.scores.candidates.chips <= most_chips)
        priced = bool((chosen & self.costs.priced).any())
        if priced and self.ask.objective == "cheapest":
            chosen = chosen & self.costs.priced
        return ranked(chosen, self.ask.objective, self.scores, self.costs, priced=priced)

    def unpriced_order(self) -> np.ndarray:
        """Return candidates that pass but have no price to be ranked by, by chip-hours."""
        if not self.priced or self.ask.objective != "cheapest":
            return np.empty(0, int)
        unpriced = self.verdicts.passed & ~self.costs.priced
        return ranked(unpriced, self.ask.objective, self.scores, self.costs, priced=False)

    def front(self, order: np.ndarray) -> list[int]:
        """Return the best candidates of slices that no other slice beats in both time and money.

        Days and money within `SAME` count as equal, so the first of either order is included.
        """
        firsts = self._first_of_each_slice(order)
        money = self.costs.usd if self.priced else self.costs.chip_hours
        found = pareto_front(bins(self.costs.days[firsts]), bins(money[firsts]))
        return [self._plainest(order, int(firsts[position])) for position in found]

    def choice(self, index: int) -> Choice:
        """Return one candidate with its job and all figures."""
        if index not in self._choices:
            self._choices[index] = self._make_choice(index)
        return self._choices[index]

    def _make_choice(self, index: int) -> Choice:
        ask, scores, costs = self.ask, self.scores, self.costs
        subject, market, candidates = ask.subject, ask.market, scores.candidates
        mesh = candidates.meshes[candidates.mesh[index]]
        on = mesh.slice
        tokens_per_step = int(scores.tokens_per_step[index])
        steps = math.ceil(ask.tokens / tokens_per_step)
        quote, region = costs.quotes[on]
        precision = PRECISIONS[candidates.precision[index]]
        optimizer = candidates.optimizers[candidates.optimizer[index]]
        model: JsonObject = {}
        if precision != subject.precision:
            matmul = spelled_as(precision, OPERANDS) or "dtype"
            changes = {**subject.job.model_changes, "matmul": matmul}
            model = {"model": {"preset": subject.name, **changes}}
        job = subject.job.replace(
            model,
            on=str(on),
            # With -1 for one axis the job can be checked on other slices too.
            mesh=refill_mesh(mesh.joined_sizes, on.devices) or mesh.joined_sizes,
            dcn_mesh=mesh.dcn_mesh,
            batch_size=int(candidates.examples[index]),
            sequence_length=subject.sequence_length,
            microbatches=int(candidates.microbatches[index]),
            remat=candidates.remats[candidates.remat[index]],
            options=_WHOLE_PRODUCTS if mesh.sizes.get("tensor", 1) == 1 else {},
            train={
                **optimizer_settings(optimizer),
                **subject.fine_tuning,
                **({"steps": steps} if steps in COUNT else {}),
            },
            launch=market.launch_terms(on),
        )
        return Choice(
            job=job,
            precision=precision,
            memory={name: float(value[index]) for name, value in scores.memory.to_dict().items()},
            usable_bytes=float(scores.usable_bytes[index]),
            modelled_step_s=float(scores.step_time_s[index]),
            seconds_by_cause=scores.step.at(index),
            steps=steps,
            model_flops=subject.flops_per_token * tokens_per_step,
            usd_per_chip_hour=quote,
            region=region,
            preemption=market.preemption if market.tier == SPOT else None,
            save_s=float(costs.save_s[index]),
            write_s=float(costs.write_s[index]),
        ).corrected(1.0)

    def slice(self, index: int) -> Slice:
        """Return the slice of a candidate."""
        candidates = self.scores.candidates
        return candidates.meshes[candidates.mesh[index]].slice

    def best_of_each_slice(self, order: np.ndarray) -> Iterator[int]:
        """Yield the best candidate of every slice.

        Of candidates as good as the first, it is the simplest.
        """
        for first in self._first_of_each_slice(order):
            yield self._plainest(order, int(first))

    def _first_of_each_slice(self, order: np.ndarray) -> np.ndarray:
        _, firsts = np.unique(self._target_numbers[order], return_index=True)
        return order[np.sort(firsts)]

    def _plainest(self, order: np.ndarray, first: int) -> int:
        near = order[self._target_numbers[order] == self._target_numbers[first]]
        for key in (self._money, self.costs.days):
            # Candidates no worse than the first, in the bins that the order is sorted by.
            least = float(np.min(key[order]))
            near = near[bins(key[near], least) <= bins(key[first : first + 1], least)]
        plain = np.lexsort((self._memory_share[near], self._unusual[near]))
        return int(near[plain[0]])

    def rival(self, order: np.ndarray, first: int) -> int | None:
        """Return the best candidate of the slice with another mesh, if it is nearly as fast."""
        candidates = self.scores.candidates
        own = candidates.meshes[candidates.mesh[first]].joined_sizes
        close = self.costs.days[first] * (1 + Accuracy.of().close_steps)
        for index in order[self._target_numbers[order] == self._target_numbers[first]]:
            if candidates.meshes[candidates.mesh[index]].joined_sizes != own:
                return int(index) if self.costs.days[index] <= close else None
        return None

    @cached_property
    def _choices(self) -> dict[int, Choice]:
        return {}

    @cached_property
    def _unusual(self) -> np.ndarray:
        return unusual(self.scores)

    @cached_property
    def _memory_share(self) -> np.ndarray:
        return self.scores.memory_share

    @cached_property
    def _money(self) -> np.ndarray:
        return np.where(self.costs.priced, self.costs.usd, self.costs.chip_hours)

    @cached_property
    def _target_numbers(self) -> np.ndarray:
        numbers: dict[Slice, int] = {}
        meshes = self.scores.candidates.meshes
        known = [numbers.setdefault(mesh.slice, len(numbers)) for mesh in meshes]
        return self.scores.candidates.of_mesh(known)

    def rejections(self) -> tuple[Rejection, ...]:
        """Return the slices without a candidate that passes."""
        ask = self.ask
        return find_rejections(
            ask.space.slices,
            self.scores,
            self.costs,
            self.verdicts,
            ask.limits,
            ask.market.preemption,
        )

    def nearest(self) -> tuple[np.ndarray, str]:
        """Return the candidates nearest to the limits when none passes, and which limit fails."""
        limits, verdicts = self.ask.limits, self.verdicts
        deadline = limits.deadline_days
        in_reach = verdicts.runs & verdicts.in_time
        if in_reach.any():  # so the budget is what fails
            within = f" within {days_text(deadline)}" if deadline else ""
            words = f"nothing costs ${limits.budget_usd:,.0f} or less{within}"
            return replaced(self, "cheapest").order(passed=in_reach), words
        if verdicts.runs.any() and deadline:
            order = replaced(self, "fastest").order(passed=verdicts.runs)
            return order, f"nothing ends within {days_text(deadline)}"
        if verdicts.fits.any():
            fits = np.flatnonzero(verdicts.fits)
            why = why_never(fits, self.scores, self.costs, self.ask.market.preemption)
            return np.empty(0, int), f"a run on spot {why}"
        return np.empty(0, int), ""


def replaced(search: Search, objective: ObjectiveName) -> Search:
    """Return the search with another objective."""
    return replace(search, ask=replace(search.ask, objective=objective))


def optimizer_settings(optimizer: OptimizerSpec) -> JsonObject:
    """Return the `train:` settings of an optimizer that differ from the defaults."""
    usual = OptimizerSpec()
    name = {} if optimizer.name == usual.name else {"optimizer": optimizer.name}
    dtype = optimizer.moment_dtype
    return {**name, **({} if dtype == usual.moment_dtype else {"moment_dtype": dtype})}

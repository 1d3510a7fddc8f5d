"""Objective and limits of a plan: which candidates meet them, and in which order."""

from dataclasses import dataclass
from functools import cache
from typing import Literal, cast, get_args

import numpy as np

from ...errors import ConfigError, did_you_mean
from ...hardware import list_slices
from ...runtime.ranges import Range
from ..cost.candidates import GENERATIONS
from ..cost.model_shape import ModelShape
from ..cost.money import Costs
from ..cost.scoring import Scores

ObjectiveName = Literal["cheapest", "fastest", "fewest-chips"]
OBJECTIVES: tuple[str, ...] = get_args(ObjectiveName)
SAME = 0.01  # costs that differ by less are equal: the arithmetic is not more precise


@dataclass(frozen=True, kw_only=True)
class PlanLimits:
    """Limits of a plan; None for no limit.

    Attributes:
        deadline_days: Most days of the run.
        budget_usd: Most dollars of the run.
        min_headroom: Share of usable HBM that must stay free by the model.
    """

    deadline_days: float | None = None
    budget_usd: float | None = None
    min_headroom: float = 0.05

    def __post_init__(self) -> None:
        for name in ("deadline_days", "budget_usd"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name} is {value}; it must be above 0, or left out.")
        Range(0, 0.99).check("min_headroom", self.min_headroom, unit="of HBM")


def is_budget_alone(objective: str | None, limits: PlanLimits) -> bool:
    """Whether a budget is the only limit, and no objective is given."""
    return objective is None and limits.budget_usd is not None and limits.deadline_days is None


def read_objective(name: str | None, limits: PlanLimits) -> ObjectiveName:
    """Return the objective of that name; without a name, the one that fits the limits.

    With only a budget it is the fastest, otherwise the cheapest.
    """
    if name is None:
        return "fastest" if is_budget_alone(name, limits) else "cheapest"
    wanted = name.replace("_", "-").replace(" ", "-")
    if wanted not in OBJECTIVES:
        raise ConfigError(
            f"objective '{name}' is not one of {', '.join(OBJECTIVES)}."
            + did_you_mean(wanted, OBJECTIVES)
        )
    return cast(ObjectiveName, wanted)


@dataclass(frozen=True)
class Judgement:
    """Which candidates pass each limit, in the order of the tests."""

    fits_device: np.ndarray
    fits_host: np.ndarray
    finishes: np.ndarray
    in_time: np.ndarray
    affordable: np.ndarray

    @property
    def passed(self) -> np.ndarray:
        """The candidates that pass all limits."""
        return self.runs & self.in_time & self.affordable

    @property
    def fits(self) -> np.ndarray:
        """The candidates that fit in the memory of devices and hosts."""
        return self.fits_device & self.fits_host

    @property
    def runs(self) -> np.ndarray:
        """The candidates that can finish, whatever their time and cost."""
        return self.fits & self.finishes


def judge(scores: Scores, costs: Costs, limits: PlanLimits) -> Judgement:
    """Test every candidate against the limits; without a price no candidate is affordable."""
    everything = np.ones(len(scores.candidates), bool)
    deadline, budget = limits.deadline_days, limits.budget_usd
    return Judgement(
        fits_device=scores.memory_share <= 1 - limits.min_headroom,
        fits_host=scores.host_share <= 1,
        finishes=costs.finishes,
        in_time=everything if deadline is None else costs.days <= deadline,
        affordable=everything if budget is None else costs.usd <= budget,
    )


def ranked(
    chosen: np.ndarray, objective: ObjectiveName, scores: Scores, costs: Costs, *, priced: bool
) -> np.ndarray:
    """Return the indices of the chosen candidates, the best first.

    Money and days that differ by less than `SAME` count as equal, so the first is within `SAME` of
    the best. Ties go to the simpler candidate, then to the one with more free memory.
    """
    indices = np.flatnonzero(chosen)
    money = bins((costs.usd if priced else costs.chip_hours)[indices])
    days, chips = bins(costs.days[indices]), scores.candidates.chips[indices]
    orders = {
        "cheapest": (money, days, chips),
        "fastest": (days, money, chips),
        "fewest-chips": (chips, days, money),
    }
    keys = (*orders[objective], unusual(scores)[indices], scores.memory_share[indices])
    return indices[np.lexsort(keys[::-1])]


def unusual(scores: Scores) -> np.ndarray:
    """Count complications per candidate: narrow formats, microbatches, further axes.

    Communication along further axes, with the host, or between slices that share weights is the
    least certain part of a step's time.
    """
    c = scores.candidates
    axes = ("tensor", "expert", "context", "stage")
    further = sum((c.sizes[axis] > 1).astype(int) for axis in axes)
    outside = (np.asarray(scores.memory.host) > 0).astype(int) + (c.slices_sharing > 1)
    return c.optimizer + c.precision + (c.microbatches > 1) + further + outside


def bins(values: np.ndarray, least: float | None = None) -> np.ndarray:
    """Return how many steps of `SAME` each value is above the least."""
    if least is None:
        least = float(np.min(values, initial=np.inf, where=~np.isnan(values)))
    return values if np.isinf(least) else np.floor(np.log(values / least) / np.log1p(SAME))


def pareto_front(days: np.ndarray, money: np.ndarray) -> np.ndarray:
    """Return the positions that no other beats in both time and money, the fastest first.

    Of equal positions only the first is returned; those without a price are left out.
    """
    known = np.flatnonzero(~np.isnan(money))
    order = known[np.lexsort((money[known], days[known]))]
    best = np.minimum.accumulate(np.concatenate([[np.inf], money[order]]))[:-1]
    return order[money[order] < best]


# Kaplan et al. 2020 (arXiv:2001.08361): the loss of a model after training on a number of tokens,
# equation 1.5 with table 2, and the critical batch size at that loss, figure 10.
KAPLAN = "Kaplan et al. 2020, arXiv:2001.08361"
_PARAMETERS_C, _PARAMETERS_POWER = 6.4e13, 0.076
_TOKENS_C, _TOKENS_POWER = 1.8e13, 0.103
_BATCH_TOKENS, _LOSS_POWER = 2.1e8, 4.8
# Brown et al. 2020 (arXiv:2005.14165), table 2.1: batch sizes of GPT-3's smallest models.
LEAST_BATCH_TOKENS = 2**19
# Llama 3 405B ended with steps of 16 M tokens (arXiv:2407.21783).
LARGEST_BATCH_TOKENS = 16 * 2**20
# Google Cloud documentation, /tpu/docs/plan-tpus: capacity is reserved for a run for 90 days at
# most; for longer there are contracts of a year.
LONGEST_RESERVATION_DAYS = 90.0


def critical_batch_tokens(shape: ModelShape, tokens: float) -> float:
    """Return the tokens per step beyond which larger steps hardly reduce the number of steps.

    Args:
        shape: The model; embeddings are not counted, as in the published fit.
        tokens: Tokens to train on.
    """
    parameters = shape.parameters - shape.outside_parameters
    of_size = (_PARAMETERS_C / parameters) ** (_PARAMETERS_POWER / _TOKENS_POWER)
    loss = (of_size + _TOKENS_C / tokens) ** _TOKENS_POWER
    critical = _BATCH_TOKENS / loss**_LOSS_POWER
    return float(np.clip(critical, LEAST_BATCH_TOKENS, LARGEST_BATCH_TOKENS))


@cache
def pod_chips() -> int:
    """Return the chips of the largest slice that zones list for every generation (v5e, v6e)."""
    return min(max(one.chips for one in list_slices(name)) for name in GENERATIONS)


def usual_chips(chips: np.ndarray, days: np.ndarray) -> int:
    """Return the most chips for a run with a budget and no deadline.

    That is one pod, doubled until a slice finishes within the longest reservation.

    Args:
        chips: Chips of each affordable candidate.
        days: Days of each.
    """
    most = pod_chips()
    while (chips > most).any() and not (days[chips <= most] <= LONGEST_RESERVATION_DAYS).any():
        most *= 2
    return most

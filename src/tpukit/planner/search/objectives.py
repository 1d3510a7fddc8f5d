"""What is wanted: an objective under limits, and which candidates meet them."""

from dataclasses import dataclass
from typing import Literal, cast, get_args

import numpy as np

from ...errors import ConfigError, did_you_mean
from ...runtime.ranges import Range
from ..cost.money import Costs
from .scoring import Scores

ObjectiveName = Literal["cheapest", "fastest", "fewest-chips"]
OBJECTIVES: tuple[str, ...] = get_args(ObjectiveName)
SAME = 0.01  # costs that differ by less are equal: the arithmetic is not more precise


@dataclass(frozen=True, kw_only=True)
class PlanLimits:
    """What a plan must keep to; None is no limit.

    Attributes:
        deadline_days: The run ends within so many days.
        budget_usd: It costs at most this.
        min_headroom: Share of usable HBM that stays free by the model.
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
    """Return whether a budget is all that was asked for."""
    return objective is None and limits.budget_usd is not None and limits.deadline_days is None


def read_objective(name: str | None, limits: PlanLimits) -> ObjectiveName:
    """The objective of that name; without one, what the limits leave open.

    A budget alone asks for the fastest it can buy; anything else for the cheapest.
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
    """Which candidates pass each limit, in the order they are tested."""

    fits_device: np.ndarray
    fits_host: np.ndarray
    finishes: np.ndarray
    in_time: np.ndarray
    affordable: np.ndarray

    @property
    def passed(self) -> np.ndarray:
        """The candidates that meet all."""
        return self.runs & self.in_time & self.affordable

    @property
    def fits(self) -> np.ndarray:
        """The candidates that the memories of devices and hosts hold."""
        return self.fits_device & self.fits_host

    @property
    def runs(self) -> np.ndarray:
        """The candidates that can be run to their end, however long and dear."""
        return self.fits & self.finishes


def judge(scores: Scores, costs: Costs, limits: PlanLimits) -> Judgement:
    """Hold every candidate against the limits; without a price nothing is affordable."""
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

    Money and days that differ by less than `SAME` are equal, so the first is the best or within
    `SAME` of it. What is left open goes to the plainer candidate, then to the one with more free
    memory.
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
    """How many complications a candidate has: narrow formats, micro-batches, further axes.

    What is exchanged along further axes, with the host, or between slices that share weights, is
    the least certain part of a step's time.
    """
    c = scores.candidates
    axes = ("tensor", "expert", "context", "stage")
    further = sum((c.sizes[axis] > 1).astype(int) for axis in axes)
    outside = (np.asarray(scores.memory.host) > 0).astype(int) + (c.slices_sharing > 1)
    return c.optimizer + c.precision + (c.microbatches > 1) + further + outside


def bins(values: np.ndarray, least: float | None = None) -> np.ndarray:
    """Return how many `SAME` each value is above the least; 0 for all within one of it."""
    if least is None:
        least = float(np.min(values, initial=np.inf, where=~np.isnan(values)))
    return values if np.isinf(least) else np.floor(np.log(values / least) / np.log1p(SAME))


def pareto_front(days: np.ndarray, money: np.ndarray) -> np.ndarray:
    """Positions that no other beats in both time and money, the fastest first.

    Of equals the first stands for all; what has no price is left out.
    """
    known = np.flatnonzero(~np.isnan(money))
    order = known[np.lexsort((money[known], days[known]))]
    best = np.minimum.accumulate(np.concatenate([[np.inf], money[order]]))[:-1]
    return order[money[order] < best]

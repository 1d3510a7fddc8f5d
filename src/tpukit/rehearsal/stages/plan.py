"""Plan the job: the cheapest slice, and the job's own, with price and time."""

from dataclasses import dataclass
from typing import Any, ClassVar

from ...hardware.figure import seconds_text
from ...job.job import Job
from ...planner.amounts import count_text, days_text
from ...planner.answer.result import PlanResult
from ...planner.planning import plan
from ...planner.search.choice import Choice
from ..stage import LeftOut, Scene, StageResult
from ..stand_in import config_of

TOKENS_A_PARAMETER = 20
_WHY_TOKENS = f"{TOKENS_A_PARAMETER} a parameter, by arXiv 2203.15556"


@dataclass(frozen=True)
class Plan(StageResult):
    """The planner's results.

    Attributes:
        anywhere: The plan over all slices.
        there: The plan on the job's own slice; None where nothing fits on it.
        tokens_from: Where the number of tokens comes from.
    """

    anywhere: PlanResult
    there: PlanResult | None
    tokens_from: str
    slice: str
    _facts = ("tokens_from", "anywhere", "there")

    @property
    def sentence(self) -> str:
        """The cheapest slice, and the price on the job's own slice."""
        result, best = self.anywhere, self.anywhere.best
        words = f"{result.model} on {count_text(result.tokens)} tokens ({self.tokens_from}): "
        if best is None:
            return words + result.shortfall
        words += f"cheapest on {best.slice}, {_price(best)} and {days_text(best.days)}"
        mine = self.there.best if self.there is not None else None
        if mine is None:
            return f"{words}; by the model it does not fit on {self.slice}"
        return (
            f"{words}; on {mine.slice} {_price(mine)} and {days_text(mine.days)}, steps of "
            f"{seconds_text(mine.step_time_s)} (model)"
        )


class PlanStage:
    """Runs the planner."""

    name: ClassVar[str] = "plan"
    question: ClassVar[str] = "Which slice, for how much and how long?"

    def run(self, scene: Scene) -> Plan:
        """Plan over all slices and on the job's own, without compiling; the check compiles."""
        job, config = scene.job, config_of(scene.job)
        if config is None:
            raise LeftOut(
                "left out: only the compiler can judge a user's own model; use tpukit plan"
            )
        tokens, why = _tokens(job, config.parameter_count().total)

        def ask(**where: Any) -> PlanResult:
            return plan(
                config,
                tokens=tokens,
                sequence_length=job.tokens_per_example,
                optimizer=job.train.optimizer,
                verify=0,
                progress=scene.progress,
                **where,
            )

        there = ask(on=[str(job.slice)])
        feasible = there if there.feasible and there.best is not None else None
        return Plan(ask(), feasible, why, str(job.slice))


def _price(choice: Choice) -> str:
    return "no published price" if choice.usd.value is None else choice.usd.text


def _tokens(job: Job, parameters: int) -> tuple[float, str]:
    """Return the number of tokens to plan for, and its origin."""
    if job.train.steps is not None:
        return float(job.train.steps * job.tokens_per_step), f"its {job.train.steps:,} steps"
    return float(TOKENS_A_PARAMETER * parameters), _WHY_TOKENS

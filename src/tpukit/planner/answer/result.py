"""`PlanResult`: the answer, what it is based on, and what was left out and why."""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import TPUValidationError
from ...job.model_source import is_own_model
from ...runtime.files import write_output
from ...shown import Shown
from ..search.objectives import SAME
from ..search.search import Ask
from .choice import Choice
from .recorded import SCHEMA
from .rejections import Rejection

FEASIBLE, INFEASIBLE = 0, 3
JOB_FILE = "job.yaml"
_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class PlanResult(Shown):
    """Slices and meshes for a training run, the best first.

    Attributes:
        choices: The best candidate of each of the best slices; when nothing meets the limits,
            those that come nearest.
        shortfall: Why nothing meets the limits; "" when something does.
        unpriced: Choices without a published price, by chip-hours.
        front: Where nothing is both faster and cheaper, the fastest first.
        disagreements: Where model and compiler differ.
        assumptions: What the figures rest on, each with its source.
        most_chips: The most chips of a choice, where only a budget was given; None without limit.
        least: The best of what choices are ranked by, over all candidates, by the model.
        scored: Candidates weighed, in `search_s` seconds.
        job_file: Where the first choice was written as a job; None while it was not.
    """

    ask: Ask
    choices: tuple[Choice, ...]
    shortfall: str = ""
    unpriced: tuple[Choice, ...] = ()
    front: tuple[Choice, ...] = ()
    rejected: tuple[Rejection, ...] = ()
    disagreements: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    most_chips: int | None = None
    least: float | None = None
    ranked_by: str
    scored: int
    search_s: float = field(repr=False)
    verify_s: float | None = field(default=None, repr=False)
    job_file: Path | None = None

    @property
    def model(self) -> str:
        """What is trained."""
        return self.ask.subject.name

    @property
    def tokens(self) -> float:
        """How many it is trained on."""
        return self.ask.tokens

    @property
    def objective(self) -> str:
        """What the choices are ranked by."""
        return self.ask.objective

    @property
    def headline(self) -> str:
        """The objective as a word, with what keeps the first choice from being simply that."""
        best, word = self.best, self.objective.upper()
        if best is None or not self.feasible:
            return word
        value = _ranked_value(best, self.ranked_by)
        most = math.inf if self.most_chips is None else self.most_chips
        rivals = (one for one in (*self.choices, *self.front) if one.slice.chips <= most)
        values = [_ranked_value(one, self.ranked_by) for one in rivals]
        if self.verify_s is None and self.least is not None:
            values.append(self.least)
        notes = [] if self.most_chips is None else [f"up to {self.most_chips:,} chips"]
        if value > min(values) * (1 + SAME):
            notes.append("of those compiled")
        elif value > min(values) * (1 + _ROUNDING):
            notes.append("within 1 %")
        return f"{word} ({', '.join(notes)})" if notes else word

    @property
    def feasible(self) -> bool:
        """Whether something meets every limit."""
        return not self.shortfall

    @property
    def best(self) -> Choice | None:
        """The first choice."""
        return self.choices[0] if self.choices else None

    @property
    def extrapolations(self) -> tuple[str, ...]:
        """Where choices are to be faster than any published step on such chips."""
        highest: dict[tuple[str, str], Choice] = {}
        for choice in (*self.choices, *self.unpriced, *self.front):
            kind = (choice.slice.chip.name, choice.mfu_peak)
            before = highest.get(kind)
            if choice.extrapolates and (before is None or (choice.mfu or 0) > (before.mfu or 0)):
                highest[kind] = choice
        return tuple(
            f"{chip}: up to {choice.mfu or 0:.1%} of {peak} peak; {_reached(choice)}"
            for (chip, peak), choice in highest.items()
        )

    @property
    def exit_code(self) -> int:
        """What a command ends with: 0, or 3 when nothing meets the limits."""
        return FEASIBLE if self.feasible else INFEASIBLE

    @property
    def next_command(self) -> str:
        """What to run next for the first choice; "" when there is none."""
        from ...checker.next_command import command, job_settings

        if self.best is None:
            return ""
        if self.job_file is not None:
            return f"tpukit check {self.job_file}"
        job = self.best.job
        if job.model_changes or job.dcn_mesh or is_own_model(job.model):
            return f"tpukit check {JOB_FILE}"  # a command line cannot say all of it
        target, settings = job_settings(job)
        # A check asks nobody for capacity, so what only a launch reads stays out of its command.
        read = {key: value for key, value in settings.items() if not key.startswith("launch.")}
        return command("check", target, read)

    def to_yaml(self, path: Path | str) -> None:
        """Write the first choice as a job file for `tpukit check` and `tpukit train`.

        Raises:
            TPUValidationError: There is no choice.
        """
        if self.best is None:
            raise TPUValidationError(f"There is no job to write to {path}: {self.shortfall}.")
        self.best.job.to_yaml(path)

    def to_html(self, path: Path | str) -> None:
        """Write the answer as one page that needs nothing else."""
        from .page import render_page

        write_output(Path(path), render_page(self))

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        ask = self.ask
        return {
            "schema": SCHEMA,
            "model": ask.subject.name,
            "parameters": ask.subject.shape.parameters if ask.subject.known else None,
            "tokens": ask.tokens,
            "sequence_length": ask.subject.sequence_length,
            "objective": ask.objective,
            "deadline_days": ask.limits.deadline_days,
            "budget_usd": ask.limits.budget_usd,
            "min_headroom": ask.limits.min_headroom,
            "max_batch_tokens": ask.max_batch_tokens,
            "tier": ask.market.tier,
            "regions": list(ask.market.regions),
            "headline": self.headline,
            "most_chips": self.most_chips,
            "feasible": self.feasible,
            "shortfall": self.shortfall,
            "ranked_by": self.ranked_by,
            "choices": [choice.to_dict() for choice in self.choices],
            "unpriced": [choice.to_dict() for choice in self.unpriced],
            "pareto_front": [choice.to_dict() for choice in self.front],
            "rejected": [one.to_dict() for one in self.rejected],
            "extrapolations": list(self.extrapolations),
            "disagreements": list(self.disagreements),
            "assumptions": list(self.assumptions),
            "next_command": self.next_command,
            "scored": self.scored,
            "search_s": self.search_s,
            "verify_s": self.verify_s,
        }

    def __rich__(self) -> Any:
        from .report import plan_report

        return plan_report(self)


def _ranked_value(choice: Choice, ranked_by: str) -> float:
    """Return what a choice is ranked by; infinite where it has no price."""
    if ranked_by == "dollars":
        return math.inf if choice.usd.value is None else choice.usd.value
    values = {"days": choice.days, "chips": choice.slice.chips, "chip-hours": choice.chip_hours}
    return values[ranked_by]


def _reached(choice: Choice) -> str:
    most = choice.most_measured
    return most.reason if most.value is None else f"{most.value:.1%} is {most.note}"

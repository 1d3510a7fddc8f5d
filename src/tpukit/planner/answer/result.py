"""`PlanResult`: the answer of a plan; `RecordedPlan`: the same, read back from its JSON."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from ...errors import TPUError, TPUValidationError
from ...exit_codes import ExitCode
from ...job.model_source import is_own_model
from ...plain_data import JsonMapping, JsonObject
from ...runtime.files import write_output
from ...shown import Renderable, Shown
from ..search.choice import Choice
from ..search.objectives import SAME
from ..search.rejections import Rejection
from ..search.search import Ask

SCHEMA = "tpukit.plan/1"
"""Raise the number when a key changes its meaning; a new key is no such change."""
JOB_FILE = "job.yaml"
_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class PlanChoices:
    """Slices and meshes for a training run, the best first.

    Attributes:
        choices: The best candidate of each of the best slices; when no candidate meets the limits,
            those nearest to them.
        shortfall: Why no candidate meets the limits; "" when one does.
        unpriced: Choices without a published price, by chip-hours.
        front: Choices that no other beats in both time and money, the fastest first.
        rejected: Slices without a candidate that meets the limits, and why.
        disagreements: Notes where the model and the compiler differ.
        assumptions: The assumptions behind the figures, each with its source.
    """

    choices: tuple[Choice, ...]
    shortfall: str = ""
    unpriced: tuple[Choice, ...] = ()
    front: tuple[Choice, ...] = ()
    rejected: tuple[Rejection, ...] = ()
    disagreements: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()

    @property
    def feasible(self) -> bool:
        """Whether a choice meets every limit."""
        return not self.shortfall

    @property
    def best(self) -> Choice | None:
        """The first choice."""
        return self.choices[0] if self.choices else None


@dataclass(frozen=True, kw_only=True)
class PlanResult(Shown, PlanChoices):
    """The answer of `plan`.

    Attributes:
        ask: The request: model, tokens, limits, slices and prices.
        most_chips: The most chips of a choice, where only a budget was given; None for no limit.
        least: The lowest value that choices are ranked by, over all candidates, from the model.
        ranked_by: "dollars", "chip-hours", "days" or "chips".
        scored: Number of candidates that were scored, in `search_s` seconds.
        job_file: The file that the first choice was written to; None if it was not written.
    """

    ask: Ask
    most_chips: int | None = None
    least: float | None = None
    ranked_by: str
    scored: int
    search_s: float = field(repr=False)
    verify_s: float | None = field(default=None, repr=False)
    job_file: Path | None = None
    schema = SCHEMA
    _facts = (
        "schema model=ask.subject.name tokens=ask.tokens "
        "sequence_length=ask.subject.sequence_length objective=ask.objective "
        "deadline_days=ask.limits.deadline_days budget_usd=ask.limits.budget_usd "
        "min_headroom=ask.limits.min_headroom max_batch_tokens=ask.max_batch_tokens "
        "tier=ask.market.tier regions=ask.market.regions headline most_chips feasible shortfall "
        "ranked_by choices unpriced pareto_front=front rejected extrapolations disagreements "
        "assumptions next_command scored search_s verify_s"
    )

    @property
    def model(self) -> str:
        """Name of the model."""
        return self.ask.subject.name

    @property
    def tokens(self) -> float:
        """Tokens to train on."""
        return self.ask.tokens

    @property
    def objective(self) -> str:
        """The objective that choices are ranked by."""
        return self.ask.objective

    @property
    def headline(self) -> str:
        """The objective in capitals, with a note where the first choice is only nearly the best."""
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
    def extrapolations(self) -> tuple[str, ...]:
        """Notes on chips where a choice is predicted to be faster than any published step."""
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
        """Exit code of the command: 0, or 3 when no choice meets the limits."""
        return ExitCode.DONE if self.feasible else ExitCode.DOES_NOT_FIT

    @property
    def next_command(self) -> str:
        """The command to run next for the first choice; "" without a choice."""
        from ...checker.next_command import command, job_settings

        if self.best is None:
            return ""
        if self.job_file is not None:
            return f"tpukit check {self.job_file}"
        job = self.best.job
        if job.model_changes or job.dcn_mesh or is_own_model(job.model):
            return f"tpukit check {JOB_FILE}"  # no command line has an option for each of them
        target, settings = job_settings(job)
        # A check requests no capacity, so it does not need the launch settings.
        read = {key: value for key, value in settings.items() if not key.startswith("launch.")}
        return command("check", target, read)

    def to_yaml(self, path: Path | str) -> None:
        """Write the first choice as a job file for `tpukit check` and `tpukit train`.

        Raises:
            TPUValidationError: There is no choice.
        """
        if self.best is None:
            raise TPUValidationError(f"there is no job to write to {path}: {self.shortfall}.")
        self.best.job.to_yaml(path)

    def to_html(self, path: Path | str) -> None:
        """Write the answer as one self-contained HTML page."""
        from .page import render_page

        write_output(Path(path), render_page(self))

    def to_dict(self) -> JsonObject:
        """Return the whole answer as plain data."""
        subject = self.ask.subject
        parameters = subject.shape.parameters if subject.known else None
        return {**super().to_dict(), "parameters": parameters}

    def __rich__(self) -> Renderable:
        from .report import plan_report

        return plan_report(self)


def _ranked_value(choice: Choice, ranked_by: str) -> float:
    """Return the value that a choice is ranked by; infinite where it has no price."""
    if ranked_by == "dollars":
        return math.inf if choice.usd.value is None else choice.usd.value
    values = {"days": choice.days, "chips": choice.slice.chips, "chip-hours": choice.chip_hours}
    return values[ranked_by]


def _reached(choice: Choice) -> str:
    most = choice.most_measured
    return most.reason if most.value is None else f"{most.value:.1%} is {most.note}"


@dataclass(frozen=True, kw_only=True)
class RecordedPlan(PlanChoices):
    """A plan read back from JSON; its page needs no new search. See `PlanResult`."""

    model: str
    tokens: float
    objective: str
    headline: str
    extrapolations: tuple[str, ...]
    next_command: str

    @classmethod
    def from_dict(cls, data: object, *, name: str = "the plan") -> "RecordedPlan":
        """Read what `PlanResult.to_dict` wrote.

        Raises:
            TPUValidationError: It is no plan, is damaged, or was made by another version.
        """
        again = "make one with `tpukit plan … --json > plan.json`."
        if not isinstance(data, Mapping) or cast("JsonMapping", data).get("schema") != SCHEMA:
            raise TPUValidationError(
                f"{name} is not a plan that this version of tpukit can read; {again}"
            )
        kept = cast("JsonMapping", data)
        try:
            return cls(
                **{key: kept[key] for key in ("model", "tokens", "objective", "next_command")},
                headline=kept.get("headline", kept["objective"].upper()),
                shortfall=kept["shortfall"],
                choices=_choices(kept["choices"]),
                unpriced=_choices(kept["unpriced"]),
                front=_choices(kept["pareto_front"]),
                rejected=tuple(
                    Rejection(tuple(one["slices"]), one["reason"]) for one in kept["rejected"]
                ),
                extrapolations=tuple(kept["extrapolations"]),
                disagreements=tuple(kept["disagreements"]),
                assumptions=tuple(kept["assumptions"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError, TPUError) as error:
            raise TPUValidationError(f"{name} is damaged ({error!r:.200}); {again}") from error


def _choices(data: list[JsonMapping]) -> tuple[Choice, ...]:
    return tuple(map(Choice.from_dict, data))

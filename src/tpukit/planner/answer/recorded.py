"""A plan as `tpukit plan --json` kept it: enough for its page, without searching again."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from ...errors import TPUError, TPUValidationError
from .choice import Choice
from .rejections import Rejection

SCHEMA = "tpukit.plan/1"
"""Raise the number when a key changes its meaning; a new key is no such change."""


@dataclass(frozen=True, kw_only=True)
class RecordedPlan:
    """What a plan says, read back; see `PlanResult` for what each part is."""

    model: str
    tokens: float
    objective: str
    headline: str
    choices: tuple[Choice, ...]
    shortfall: str
    unpriced: tuple[Choice, ...]
    front: tuple[Choice, ...]
    rejected: tuple[Rejection, ...]
    extrapolations: tuple[str, ...]
    disagreements: tuple[str, ...]
    assumptions: tuple[str, ...]
    next_command: str

    @property
    def feasible(self) -> bool:
        """Whether something meets every limit."""
        return not self.shortfall

    @property
    def best(self) -> Choice | None:
        """The first choice."""
        return self.choices[0] if self.choices else None

    @classmethod
    def from_dict(cls, data: object, *, name: str = "the plan") -> "RecordedPlan":
        """Read what `PlanResult.to_dict` wrote.

        Raises:
            TPUValidationError: It is no plan, is damaged, or was made by another version.
        """
        again = "make one with `tpukit plan … --json > plan.json`."
        if not isinstance(data, Mapping) or cast("Mapping[str, Any]", data).get("schema") != SCHEMA:
            raise TPUValidationError(f"{name} is no plan of this tpukit; {again}")
        kept = cast("Mapping[str, Any]", data)
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


def _choices(data: list[Mapping[str, Any]]) -> tuple[Choice, ...]:
    return tuple(map(Choice.from_dict, data))

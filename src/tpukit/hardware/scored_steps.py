"""Published training steps beside what the timeline predicted of them, and the band that follows.

`data/scored_steps.json` is what `benchmarks/predict.py` wrote when it last scored the model. Each
step was predicted with constants fitted on other sources and other generations.
"""

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from typing import Any

TAIL = 0.05  # of steps beyond the band on each side: nine of ten are expected inside


@dataclass(frozen=True)
class ScoredStep:
    """One published step.

    Attributes:
        source: Where it was published; rows of one log or one table share it.
        predicted_s: With the constants as they are shipped.
        held_out_s: With constants fitted without its source and its generation.
        left_out: Why it does not count, or "".
        date: When it was predicted.
    """

    name: str
    source: str
    chip: str
    published_s: float
    predicted_s: float
    held_out_s: float
    left_out: str = ""
    date: str = ""

    @property
    def ratio(self) -> float:
        """The published time over the one that was predicted without knowing its like."""
        return self.published_s / self.held_out_s

    @property
    def error(self) -> float:
        """How far that prediction is off, as a share of the published time."""
        return abs(self.held_out_s / self.published_s - 1)


@dataclass(frozen=True)
class ScoredSteps:
    """The last scoring.

    Attributes:
        versions: Of the compiler it was made with.
        steps: Every step that was predicted, those left out of the score too.
    """

    versions: str
    steps: tuple[ScoredStep, ...]

    @classmethod
    def shipped(cls) -> "ScoredSteps":
        """The scoring that came with this package."""
        return _shipped()

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> "ScoredSteps":
        """Read what `to_dict` wrote."""
        steps = tuple(ScoredStep(**one) for one in data["steps"])
        return cls(data["versions"], steps)

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        steps = [dict(vars(one)) for one in self.steps]
        return {"versions": self.versions, "steps": steps}

    def updated_by(self, newer: "ScoredSteps") -> "ScoredSteps":
        """This scoring with the steps of another one in place of its own; new ones come last."""
        steps = {one.name: one for one in (*self.steps, *newer.steps)}
        return ScoredSteps(newer.versions, tuple(steps.values()))

    @property
    def date(self) -> str:
        """When its last step was predicted."""
        return max(one.date for one in self.steps)

    @property
    def counted(self) -> tuple[ScoredStep, ...]:
        """The steps the score is made of."""
        return tuple(one for one in self.steps if not one.left_out)

    @cached_property
    def rows_by_source(self) -> dict[str, int]:
        """How many steps each source gave, the largest first."""
        return dict(Counter(one.source for one in self.counted).most_common())

    @cached_property
    def band(self) -> "Band":
        """Where a step is expected to lie, by all that were published."""
        return Band.around(self.counted)

    @cached_property
    def covered(self) -> int:
        """Steps inside a band that was made without their source."""
        count = 0
        for source in self.rows_by_source:
            own = [one for one in self.counted if one.source == source]
            band = Band.around([one for one in self.counted if one.source != source])
            count += sum(band.holds(one) for one in own)
        return count

    @property
    def coverage_text(self) -> str:
        """Coverage in one clause, for a person."""
        rows = len(self.counted)
        return f"{self.covered} of {rows} published steps lay in one made without their source"


@dataclass(frozen=True)
class Band:
    """Shares of the predicted time by which a step may be shorter or longer."""

    below: float
    above: float

    @classmethod
    def around(cls, steps: Sequence[ScoredStep]) -> "Band":
        """The band that leaves out `TAIL` of steps on each side, in whole percent."""
        ratios = sorted(one.ratio for one in steps)
        beyond = max(0, math.floor(TAIL * (len(ratios) + 1)) - 1)
        inside = ratios[beyond : len(ratios) - beyond]
        return cls(
            below=math.ceil(100 * (1 - inside[0])) / 100,
            above=math.ceil(100 * (inside[-1] - 1)) / 100,
        )

    def holds(self, step: ScoredStep) -> bool:
        """Whether a step lies inside."""
        return 1 - self.below <= step.ratio <= 1 + self.above


@cache
def _shipped() -> ScoredSteps:
    text = files("tpukit.hardware").joinpath("data/scored_steps.json").read_text()
    return ScoredSteps.from_dict(json.loads(text))

"""Search for formats: each matrix gets the bits that its errors are worth to the model's output.

Upgrades are made in the order of what they gain for a byte. How many of them a target needs is
found by measuring on held-out data, never by what was expected.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...errors import TPUValidationError
from ..measures.evaluation import QuantizationEvaluation
from .candidates import Chosen, FormatCandidates, FormatChoice, total_bytes

CANDIDATES = ("vq2", "vq3.5", "vq4", "int4", "int8", "bf16")


@dataclass(frozen=True)
class Upgrade:
    """A finer format for a matrix."""

    name: str
    to: FormatChoice
    gain: float  # expected KL for each byte more


@dataclass(frozen=True)
class Ladder:
    """The coarsest plan, and upgrades in the order of what they gain.

    Attributes:
        candidates: What it chooses from.
        hulls: Of each matrix, the choices that are best for some price of a byte.
        upgrades: From the best one on.
    """

    candidates: FormatCandidates
    hulls: dict[str, list[FormatChoice]]
    upgrades: tuple[Upgrade, ...]

    @classmethod
    def of(cls, candidates: FormatCandidates) -> "Ladder":
        """The ladder of all candidates."""
        hulls = {name: lower_hull(choices) for name, choices in candidates.choices.items()}
        upgrades = [one for name, hull in hulls.items() for one in _upgrades(name, hull)]
        return cls(candidates, hulls, tuple(sorted(upgrades, key=lambda one: -one.gain)))

    def choices(self, steps: int) -> dict[str, FormatChoice]:
        """Every matrix's format after the first `steps` upgrades."""
        first = {name: hull[0] for name, hull in self.hulls.items()}
        return first | {one.name: one.to for one in self.upgrades[:steps]}

    def within(self, nbytes: float) -> dict[str, FormatChoice]:
        """The best choices that fit in so many bytes.

        What is expected decides: moving bytes by what every move from there measures, beside all
        other matrices, changed held-out KL by 2 % or less (one model, one seed, six sizes).

        Args:
            nbytes: Of all quantized matrices.

        Raises:
            TPUValidationError: Not even the coarsest plan does.
        """
        chosen = self.choices(0)
        least = total_bytes(chosen)
        if least > nbytes:
            raise TPUValidationError(
                f"the coarsest plan takes {least:,} bytes ({self.candidates.bits(chosen):.2f} bits "
                f"a weight), more than the {int(nbytes):,} asked for; allow more, or add coarser "
                "candidates."
            )
        blocked: set[str] = set()
        for one in self.upgrades:
            # A matrix whose next upgrade does not fit gets none of those after it.
            more = one.to.nbytes - chosen[one.name].nbytes
            if one.name in blocked or total_bytes(chosen) + more > nbytes:
                blocked.add(one.name)
                continue
            chosen[one.name] = one.to
        return chosen

    def steps_within(self, nbytes: float) -> int:
        """The most upgrades, in their order, that fit in so many bytes."""
        self.within(nbytes)
        sizes = range(len(self.upgrades) + 1)
        return max(step for step in sizes if total_bytes(self.choices(step)) <= nbytes)

    def until(
        self,
        target: float,
        limit: int,
        measure: Callable[[Chosen], QuantizationEvaluation] | None = None,
    ) -> int | None:
        """The fewest upgrades, at most `limit`, after which the target is surely met, or None.

        Args:
            target: Of the lower end of what is kept.
            limit: The most upgrades.
            measure: What choices lose on held-out data; by default, as they are.
        """
        measure = measure or self.candidates.measure
        if self._kept(limit, measure) < target:
            return None
        low, high = -1, limit
        while high - low > 1:
            middle = (low + high) // 2
            if self._kept(middle, measure) >= target:
                high = middle
            else:
                low = middle
        return high

    def _kept(self, steps: int, measure: Callable[[Chosen], QuantizationEvaluation]) -> float:
        """The lower end of what is kept after so many upgrades, on held-out data."""
        chosen = self.choices(steps)
        found = measure(chosen)
        self.candidates.calibrated.progress(
            f"{steps} of {len(self.upgrades)} upgrades: retention {found.retention.text()}, "
            f"{self.candidates.bits(chosen):.2f} bits a weight"
        )
        return found.retention.low


def lower_hull(choices: Sequence[FormatChoice]) -> list[FormatChoice]:
    """The choices that are best for some price of a byte, from the smallest on."""
    hull: list[FormatChoice] = []
    for one in sorted(choices, key=lambda choice: (choice.nbytes, choice.cost)):
        if hull and one.cost >= hull[-1].cost:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-2], one):
            hull.pop()
        hull.append(one)
    return hull


def _slope(a: FormatChoice, b: FormatChoice) -> float:
    """What a byte gains from one choice to a larger one."""
    return (a.cost - b.cost) / max(1, b.nbytes - a.nbytes)


def _upgrades(name: str, hull: Sequence[FormatChoice]) -> list[Upgrade]:
    pairs = itertools.pairwise(hull)
    return [Upgrade(name, finer, _slope(coarser, finer)) for coarser, finer in pairs]

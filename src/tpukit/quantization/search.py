"""Search for formats: each matrix gets the bits that its errors are worth to the model's output.

How much a matrix matters is measured: the KL divergence of the outputs with that one matrix in its
coarsest format. Between formats of one matrix it goes with the error of the matrix's own output,
tr(ΔᵀHΔ). Upgrades are then made in the order of what they gain for a byte; how many of them a
target needs is found by measuring on held-out data, never by the proxy.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..errors import TPUValidationError
from ..models.stored.calibration import InputStatistics
from ..models.stored.parameter import Part, part_bytes, part_matrix
from .calibrated import Calibrated
from .codec import output_error
from .evaluation import Evaluation, Evaluator
from .model import matrix_of, replaced
from .plan import SKIP, QuantPlan, check_format

CANDIDATES = ("vq2", "vq3.5", "vq4", "int4", "int8", "bf16")
# Batches of calibration data that a matrix's weight in the output is measured on.
PROBE_BATCHES = 2


@dataclass(frozen=True)
class Choice:
    """One matrix in one format: what it is, takes, and is expected to cost (KL, nats)."""

    format: str
    part: Part
    nbytes: int
    cost: float


@dataclass(frozen=True)
class Upgrade:
    """A finer format for a matrix."""

    name: str
    to: Choice
    gain: float  # expected KL for each byte more


@dataclass(frozen=True)
class Ladder:
    """The coarsest plan, and upgrades in the order of what they gain.

    Attributes:
        calibrated: The model.
        base: The plan that says which matrices are quantized.
        first: The coarsest choice of each.
        upgrades: From the best one on.
    """

    calibrated: Calibrated
    base: QuantPlan
    first: dict[str, Choice]
    upgrades: tuple[Upgrade, ...]

    def choices(self, steps: int) -> dict[str, Choice]:
        """Every matrix's format after the first `steps` upgrades."""
        return {**self.first, **{one.name: one.to for one in self.upgrades[:steps]}}

    def plan(self, steps: int) -> QuantPlan:
        """The plan after so many upgrades."""
        chosen = self.choices(steps)
        return self.base.with_formats({name: one.format for name, one in chosen.items()})

    def nbytes(self, steps: int) -> int:
        """Bytes of the quantized matrices after so many upgrades."""
        return sum(one.nbytes for one in self.choices(steps).values())

    def measure(self, steps: int) -> Evaluation:
        """What the model loses after so many upgrades, on held-out data."""
        parts = {name: one.part for name, one in self.choices(steps).items()}
        subject = self.calibrated.subject
        found = self.calibrated.evaluator(replaced(subject.params, self.calibrated.matrices, parts))
        self.calibrated.progress(
            f"{steps} of {len(self.upgrades)} upgrades: retention {found.retention.text()}, "
            f"{8 * self.nbytes(steps) / self.weights:.2f} bits a weight"
        )
        return found

    @property
    def weights(self) -> int:
        """How many weights are quantized."""
        shapes = [self.calibrated.by_name[name].shape for name in self.first]
        return sum(rows * columns for rows, columns in shapes)

    def within(self, nbytes: float) -> int:
        """The most upgrades that fit in so many bytes.

        Raises:
            TPUValidationError: Not even the coarsest plan does.
        """
        if self.nbytes(0) > nbytes:
            raise TPUValidationError(
                f"the coarsest plan takes {self.nbytes(0):,} bytes "
                f"({8 * self.nbytes(0) / self.weights:.2f} bits a weight), more than the "
                f"{int(nbytes):,} asked for; allow more, or add coarser candidates."
            )
        # Upgrades that do not fit are passed over by whoever packs; in their order is near enough.
        return max(s for s in range(len(self.upgrades) + 1) if self.nbytes(s) <= nbytes)

    def until(self, target: float, limit: int) -> int | None:
        """The fewest upgrades, at most `limit`, after which the target is surely met, or None."""
        if self.measure(limit).retention.low < target:
            return None
        low, high = -1, limit
        while high - low > 1:
            middle = (low + high) // 2
            if self.measure(middle).retention.low >= target:
                high = middle
            else:
                low = middle
        return high


def build_ladder(
    calibrated: Calibrated, base: QuantPlan, candidates: Iterable[str] = CANDIDATES
) -> Ladder:
    """Quantize every matrix in every candidate format and order the upgrades.

    Args:
        calibrated: The model.
        base: Its matrices with any format but "skip" are searched for.
        candidates: Formats.
    """
    formats = [check_format(name) for name in candidates if name != SKIP]
    if not formats:
        raise TPUValidationError("the search has no candidates; give at least one format.")
    names = list(base.quantized)
    seen = calibrated.statistics(names)
    probes = calibrated.batches[:PROBE_BATCHES]
    subject = calibrated.subject
    judge = Evaluator(subject.apply, subject.params, probes)
    first: dict[str, Choice] = {}
    upgrades: list[Upgrade] = []
    for number, name in enumerate(names):
        weight = matrix_of(subject.params, calibrated.by_name[name])
        hessian = seen[name].hessian
        made = _made(calibrated, name, formats, seen[name])
        sized = sorted(((part_bytes(part), one, part) for one, part in made), key=lambda x: x[:2])
        errors = [output_error(weight, part_matrix(part), hessian) for _, _, part in sized]
        # The weight of this matrix: its coarsest format alone, all others as they were.
        coarsest = {name: sized[errors.index(max(errors))][2]}
        kl = judge.kl(replaced(subject.params, calibrated.matrices, coarsest))
        worth = max(kl, 0.0) / max(max(errors), 1e-30)
        choices = [
            Choice(one, part, size, worth * error)
            for (size, one, part), error in zip(sized, errors, strict=True)
        ]
        hull = lower_hull(choices)
        first[name] = hull[0]
        upgrades += _upgrades(name, hull)
        calibrated.progress(f"{name}: KL {kl:.4g} at its coarsest ({number + 1} of {len(names)})")
    upgrades.sort(key=lambda one: -one.gain)
    return Ladder(calibrated, base, first, tuple(upgrades))


def _made(
    calibrated: Calibrated, name: str, formats: Sequence[str], seen: InputStatistics
) -> list[tuple[str, Part]]:
    """The matrix in every format that it can have: some need more vectors than it holds.

    Raises:
        TPUValidationError: It can have none of them.
    """
    found: list[tuple[str, Part]] = []
    why: TPUValidationError | None = None
    for format in formats:
        try:
            found.append((format, calibrated.round(name, format, seen)))
        except TPUValidationError as error:
            why = error
            calibrated.progress(f"{name}: not in {format} ({error})")
    if not found and why is not None:
        raise why
    return found


def lower_hull(choices: Sequence[Choice]) -> list[Choice]:
    """The choices that are best for some price of a byte, from the smallest on."""
    hull: list[Choice] = []
    for one in sorted(choices, key=lambda choice: (choice.nbytes, choice.cost)):
        if hull and one.cost >= hull[-1].cost:
            continue
        while len(hull) > 1 and _slope(hull[-2], hull[-1]) <= _slope(hull[-2], one):
            hull.pop()
        hull.append(one)
    return hull


def _slope(a: Choice, b: Choice) -> float:
    """What a byte gains from one choice to a larger one."""
    return (a.cost - b.cost) / max(1, b.nbytes - a.nbytes)


def _upgrades(name: str, hull: Sequence[Choice]) -> list[Upgrade]:
    pairs = itertools.pairwise(hull)
    return [Upgrade(name, finer, _slope(coarser, finer)) for coarser, finer in pairs]

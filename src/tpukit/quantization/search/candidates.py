"""Every matrix in every candidate format, and the expected cost of each for the model.

All plans, targets and sizes of a model share them. The cost of a matrix is the KL divergence of the
model's outputs with only that matrix quantized. It is measured for the coarsest format and for a
middle one, and interpolated by the error of the matrix's own output, tr(ΔᵀHΔ).
"""

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from ...errors import TPUValidationError
from ...models.stored.calibration import InputStatistics
from ...runtime.progress import Counted
from ..measures.evaluation import QuantizationEvaluation, QuantizationEvaluator
from ..model import replaced
from ..plan import SKIP, QuantPlan, check_format
from .calibrated import Calibrated, Stored

# Batches of calibration data that what a matrix costs is measured on.
PROBE_BATCHES = 2
# Programs that are compiled at a time, where there are processors for it.
_MOST_THREADS = 8
# How KL may go with the error of a matrix's output: by no less and no more than these powers.
_LEAST_POWER, _MOST_POWER = 0.5, 2.0


@dataclass(frozen=True)
class FormatChoice:
    """One matrix in one format, and its expected cost as KL in nats."""

    stored: Stored
    cost: float

    @property
    def nbytes(self) -> int:
        """Stored bytes."""
        return self.stored.nbytes


# A choice for every matrix, by name.
Chosen = Mapping[str, FormatChoice]


@dataclass(frozen=True, eq=False)
class FormatCandidates:
    """A model's matrices in all formats that a search may choose.

    Attributes:
        calibrated: The model.
        base: The plan that tells which matrices are quantized.
        choices: Per matrix, from the smallest on.
        judge: Measures plans on calibration data; reports are measured on held-out data.
    """

    calibrated: Calibrated
    base: QuantPlan
    choices: Mapping[str, tuple[FormatChoice, ...]]
    judge: QuantizationEvaluator

    @property
    def weights(self) -> int:
        """Number of quantized weights."""
        shapes = [self.calibrated.by_name[name].shape for name in self.choices]
        return sum(rows * columns for rows, columns in shapes)

    @property
    def formats(self) -> set[str]:
        """Formats that all matrices have."""
        each = [{choice.stored.format for choice in choices} for choices in self.choices.values()]
        return set.intersection(*each)

    def uniform(self, format: str) -> dict[str, FormatChoice]:
        """Return the choices with every matrix in one format.

        Raises:
            TPUValidationError: A matrix does not have this format.
        """
        chosen = {
            name: choice
            for name, choices in self.choices.items()
            for choice in choices
            if choice.stored.format == format
        }
        if len(chosen) < len(self.choices):
            missing = next(name for name in self.choices if name not in chosen)
            raise TPUValidationError(
                f"{missing} has no candidate in {format}; add that format to the candidates."
            )
        return chosen

    def bits(self, chosen: Chosen) -> float:
        """Return mean bits per weight, with scales and codebooks."""
        return 8 * total_bytes(chosen) / self.weights

    def plan(self, chosen: Chosen) -> QuantPlan:
        """Return the plan with these formats."""
        return self.base.with_formats(
            {name: choice.stored.format for name, choice in chosen.items()}
        )

    def kl(self, chosen: Chosen) -> float:
        """Return the KL of the model with these choices, on calibration data."""
        return self.judge.kl(self._params(chosen))

    def measure(self, chosen: Chosen) -> QuantizationEvaluation:
        """Evaluate the model with these choices on held-out data."""
        return self.calibrated.evaluator(self._params(chosen))

    def _params(self, chosen: Chosen) -> object:
        return _with_stored(
            self.calibrated, {name: choice.stored for name, choice in chosen.items()}
        )


def total_bytes(chosen: Chosen) -> int:
    """Return the bytes of all choices."""
    return sum(choice.nbytes for choice in chosen.values())


def make_candidates(
    calibrated: Calibrated, base: QuantPlan, formats: Iterable[str]
) -> FormatCandidates:
    """Quantize every matrix in every format once, and measure the cost of each matrix.

    Args:
        calibrated: The model.
        base: Matrices with another format than "skip" are quantized.
        formats: Names of the candidate formats.

    Raises:
        TPUValidationError: There are no formats, or none that a matrix can have.
    """
    names = list(base.quantized)
    known = list(dict.fromkeys(check_format(name) for name in formats if name != SKIP))
    if not known:
        raise TPUValidationError("the search has no candidates; give at least one format.")
    made = _made(calibrated, names, known)
    probes = calibrated.batches[:PROBE_BATCHES]
    judge = calibrated.evaluator.beside(calibrated.subject.params, probes)
    choices: dict[str, tuple[FormatChoice, ...]] = {}
    for number, name in enumerate(names, 1):

        def kl(stored: Stored, name: str = name) -> float:
            return max(0.0, judge.kl(_with_stored(calibrated, {name: stored})))

        sized = sorted(made[name], key=lambda one: (one.nbytes, one.format))
        costs = expected_costs(sized, kl)
        choices[name] = tuple(map(FormatChoice, sized, costs))
        line = f"{name}: KL {max(costs):.4g} in its coarsest format"
        calibrated.progress(Counted(line, done=number, total=len(names)))
    return FormatCandidates(calibrated, base, choices, judge)


def _with_stored(calibrated: Calibrated, stored: Mapping[str, Stored]) -> object:
    parts = {name: stored_matrix.part for name, stored_matrix in stored.items()}
    return replaced(calibrated.subject.params, calibrated.matrices, parts)


def _made(
    calibrated: Calibrated, names: Sequence[str], formats: Sequence[str]
) -> dict[str, list[Stored]]:
    """Quantize every matrix in every format, except formats that need more vectors than it has."""
    statistics = calibrated.statistics(names)
    jobs = [
        (format, some)
        for format in formats
        for some in calibrated.alike(names, dict.fromkeys(names, format)).values()
    ]

    def one(job: tuple[str, list[str]]) -> dict[str, Stored] | TPUValidationError:
        return _stored_or_why(calibrated, job[1], job[0], statistics)

    found: dict[str, list[Stored]] = {name: [] for name in names}
    why: TPUValidationError | None = None
    threads = max(1, min(_MOST_THREADS, (os.cpu_count() or 1) // 2))
    with ThreadPoolExecutor(threads) as pool:
        for number, (job, stored) in enumerate(zip(jobs, pool.map(one, jobs), strict=True), 1):
            format, some = job
            line = f"{format}: {len(some)} × {calibrated.by_name[some[0]].shape}"
            if isinstance(stored, TPUValidationError):
                why, line = stored, f"{line}: cannot be ({stored})"
            else:
                for name, made in stored.items():
                    found[name].append(made)
            calibrated.progress(Counted(line, done=number, total=len(jobs)))
    if why is not None and not all(found.values()):
        raise why
    return found


def _stored_or_why(
    calibrated: Calibrated,
    names: Sequence[str],
    format: str,
    statistics: Mapping[str, InputStatistics],
) -> dict[str, Stored] | TPUValidationError:
    try:
        return calibrated.store(names, format, statistics)
    except TPUValidationError as error:
        return error


def expected_costs(stored: Sequence[Stored], kl: Callable[[Stored], float]) -> list[float]:
    """Return the KL of each choice, measured for the largest error and a middle one."""
    by_error = sorted(stored, key=lambda one: -one.error)
    coarse, middle = by_error[0], by_error[len(by_error) // 2]
    most = kl(coarse)
    if most <= 0 or coarse.error <= 0:
        return [0.0 for _ in stored]
    if not 0 < middle.error < coarse.error:
        return [most * choice.error / coarse.error for choice in stored]
    half = kl(middle)
    if half <= 0:
        half = most * middle.error / coarse.error
    power = math.log(most / half) / math.log(coarse.error / middle.error)
    power = min(_MOST_POWER, max(_LEAST_POWER, power))
    return [
        half * (choice.error / middle.error) ** (power if choice.error > middle.error else 1.0)
        for choice in stored
    ]

"""Every matrix in every candidate format, made once, and what each would cost the model.

All plans, targets and sizes that are asked of a model share them. How much a matrix matters is
measured: the KL divergence of the outputs with that one matrix alone in its coarsest format, and in
one of the middle. Between those it goes with the error of the matrix's own output, tr(ΔᵀHΔ).
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
    """One matrix in one format, and what it is expected to cost: KL in nats."""

    stored: Stored
    cost: float

    @property
    def nbytes(self) -> int:
        """Of what is kept."""
        return self.stored.nbytes


# A choice for every matrix, by name.
Chosen = Mapping[str, FormatChoice]


@dataclass(frozen=True, eq=False)
class FormatCandidates:
    """A model's matrices in all formats that a search may choose.

    Attributes:
        calibrated: The model.
        base: The plan that says which matrices are quantized.
        choices: Of each matrix, from the smallest on.
        judge: Measures on calibration data, which plans are made by; what is reported is measured
            on held-out data.
    """

    calibrated: Calibrated
    base: QuantPlan
    choices: Mapping[str, tuple[FormatChoice, ...]]
    judge: QuantizationEvaluator

    @property
    def weights(self) -> int:
        """How many weights are quantized."""
        shapes = [self.calibrated.by_name[name].shape for name in self.choices]
        return sum(rows * columns for rows, columns in shapes)

    @property
    def formats(self) -> set[str]:
        """Formats that every matrix is there in."""
        each = [{one.stored.format for one in choices} for choices in self.choices.values()]
        return set.intersection(*each)

    def uniform(self, format: str) -> dict[str, FormatChoice]:
        """Every matrix in one format.

        Raises:
            TPUValidationError: A matrix is not there in it.
        """
        found = {
            name: choice
            for name, choices in self.choices.items()
            for choice in choices
            if choice.stored.format == format
        }
        if len(found) < len(self.choices):
            missing = next(name for name in self.choices if name not in found)
            raise TPUValidationError(f"{missing} is not among the candidates in {format}.")
        return found

    def bits(self, chosen: Chosen) -> float:
        """Mean bits a weight, scales and codebooks included."""
        return 8 * total_bytes(chosen) / self.weights

    def plan(self, chosen: Chosen) -> QuantPlan:
        """The plan with these formats."""
        return self.base.with_formats({name: one.stored.format for name, one in chosen.items()})

    def kl(self, chosen: Chosen) -> float:
        """KL of the model with these choices, on the data that plans are made by."""
        return self.judge.kl(self._params(chosen))

    def measure(self, chosen: Chosen) -> QuantizationEvaluation:
        """What the model with these choices loses on held-out data."""
        return self.calibrated.evaluator(self._params(chosen))

    def _params(self, chosen: Chosen) -> object:
        return _with_stored(self.calibrated, {name: one.stored for name, one in chosen.items()})


def total_bytes(chosen: Chosen) -> int:
    """Bytes of all choices."""
    return sum(one.nbytes for one in chosen.values())


def make_candidates(
    calibrated: Calibrated, base: QuantPlan, formats: Iterable[str]
) -> FormatCandidates:
    """Quantize every matrix in every format once, and measure what matrices are worth.

    Args:
        calibrated: The model.
        base: Its matrices with any format but "skip" are made.
        formats: Names.

    Raises:
        TPUValidationError: There are no formats, or a matrix can have none of them.
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
    parts = {name: one.part for name, one in stored.items()}
    return replaced(calibrated.subject.params, calibrated.matrices, parts)


def _made(
    calibrated: Calibrated, names: Sequence[str], formats: Sequence[str]
) -> dict[str, list[Stored]]:
    """All matrices in all formats that they can have: some need more vectors than one holds."""
    seen = calibrated.statistics(names)
    jobs = [
        (format, some)
        for format in formats
        for some in calibrated.alike(names, dict.fromkeys(names, format)).values()
    ]

    def one(job: tuple[str, list[str]]) -> dict[str, Stored] | TPUValidationError:
        return _stored_or_why(calibrated, job[1], job[0], seen)

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
    calibrated: Calibrated, names: Sequence[str], format: str, seen: Mapping[str, InputStatistics]
) -> dict[str, Stored] | TPUValidationError:
    try:
        return calibrated.store(names, format, seen)
    except TPUValidationError as error:
        return error


def expected_costs(stored: Sequence[Stored], kl: Callable[[Stored], float]) -> list[float]:
    """KL of each, measured for two of them: the one with the largest error and a middle one."""
    by_error = sorted(stored, key=lambda one: -one.error)
    coarse, middle = by_error[0], by_error[len(by_error) // 2]
    most = kl(coarse)
    if most <= 0 or coarse.error <= 0:
        return [0.0 for _ in stored]
    if not 0 < middle.error < coarse.error:
        return [most * one.error / coarse.error for one in stored]
    half = kl(middle)
    if half <= 0:
        half = most * middle.error / coarse.error
    power = math.log(most / half) / math.log(coarse.error / middle.error)
    power = min(_MOST_POWER, max(_LEAST_POWER, power))
    return [
        half * (one.error / middle.error) ** (power if one.error > middle.error else 1.0)
        for one in stored
    ]

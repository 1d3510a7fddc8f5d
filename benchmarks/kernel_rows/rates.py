"""The rates of `tpukit kernel bench`: fitted on followed rows, with the errors they leave.

What a kernel does is known exactly; three constants say how fast a chip does it.
A row is always timed by constants fitted without its shape.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from kernel_rows.rows import FOLDS
from kernel_rows.scoring import Estimated
from tpukit.kernels.timing import Calibration, ErrorBand, calibration_of

if TYPE_CHECKING:  # tokamax, a benchmark dependency, is needed to follow rows, not to fit rates
    from kernel_rows.static_timing import Followed

COMPUTE_FACTORS = (0.65, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 1.0, 1.05, 1.1, 1.15, 1.2)
HBM_EFFICIENCIES = (0.75, 0.8, 0.85, 0.88, 0.9, 0.95)
TURN_CYCLES = tuple(range(0, 801, 50))
# Kernels that wait for products say nothing of HBM: its efficiency leaves the default, which
# XLA's own ops were measured at, only where that mends the mean error by this much of the way.
HBM_PULL = 0.05
LEAST_ROWS = 5  # for constants and an error band of a kind's own
BAND = 90  # per cent of measured times on the good side of each end of a band


@dataclass(frozen=True)
class Fitted:
    """The constants of one generation, and of its kinds of kernels, and what they leave."""

    chip: str
    calibration: Calibration
    kinds: Mapping[str, Calibration]
    estimated: tuple[Estimated, ...]
    errors: tuple[ErrorBand, ...]


def fit_rates(followed: "Sequence[Followed]") -> list[Fitted]:
    """Constants and errors of each generation that has rows."""
    chips: dict[str, list[Followed]] = defaultdict(list)
    for one in followed:
        chips[one.profile.chip.name].append(one)
    return [_fit_chip(name, members) for name, members in sorted(chips.items())]


def _fit_chip(chip: str, members: "Sequence[Followed]") -> Fitted:
    table = _Table(members)
    calibration, held_out = table.fit(range(len(members)))
    bands = [_band("any", held_out)]
    estimated: list[Estimated] = []
    kinds: dict[str, Calibration] = {}
    for kind in sorted({one.kind for one in members}):
        own = [number for number, one in enumerate(members) if one.kind == kind]
        timed = [held_out[number] for number in own]
        if len(own) >= LEAST_ROWS:
            kinds[kind], timed = table.fit(own)
            bands.append(_band(kind, timed))
        estimated += timed
    return Fitted(chip, calibration, kinds, tuple(estimated), tuple(bands))


class _Table:
    """The times of a chip's rows by every choice of constants."""

    def __init__(self, members: "Sequence[Followed]") -> None:
        self._members = members
        start = calibration_of("default")
        self._choices = [
            replace(start, compute_factor=factor, hbm_efficiency=efficiency)
            for factor, efficiency in product(COMPUTE_FACTORS, HBM_EFFICIENCIES)
        ]
        still = np.array([[one.time_us(choice) for choice in self._choices] for one in members])
        clock_hz = members[0].profile.chip.clock_ghz.require("fitting rates") * 1e9
        turning = np.array([one.turns for one in members]) * 1e6 / clock_hz
        measured = np.array([one.row.measured_us for one in members])
        self._times = still[:, :, None] + turning[:, None, None] * np.array(TURN_CYCLES)
        self._misses = np.abs(np.log(self._times / measured[:, None, None]))
        self._pull = np.array([_pull(one, start) for one in self._choices])
        self._folds = np.array([one.row.fold for one in members])

    def fit(self, numbers: Sequence[int]) -> tuple[Calibration, list[Estimated]]:
        """The constants with the smallest mean error, and each row's time without its shape."""
        rows = np.array(numbers)
        timed: dict[int, float] = {}
        for fold in range(FOLDS):
            rate, turn = self._best(rows[self._folds[rows] != fold])
            for row in rows[self._folds[rows] == fold]:
                timed[int(row)] = float(self._times[row, rate, turn])
        rate, turn = self._best(rows)
        estimated = [Estimated(self._members[row].row, timed[row]) for row in numbers]
        chosen = replace(self._choices[rate], turn_cycles=float(TURN_CYCLES[turn]))
        return chosen, estimated

    def _best(self, rows: np.ndarray) -> tuple[int, int]:
        """The numbers of the best choice and turn; the default where there is no row."""
        missed = self._misses[rows].mean(axis=0) if len(rows) else np.zeros((1, len(TURN_CYCLES)))
        missed = missed + self._pull[:, None]
        return divmod(int(missed.argmin()), len(TURN_CYCLES))


def _pull(choice: Calibration, start: Calibration) -> float:
    """What keeps a choice near the default: for computing next to nothing, it breaks a tie."""
    away = abs(np.log(choice.hbm_efficiency / start.hbm_efficiency))
    return HBM_PULL * away + 1e-6 * abs(np.log(choice.compute_factor / start.compute_factor))


def _band(kind: str, rows: Sequence[Estimated]) -> ErrorBand:
    shares = np.array([one.row.measured_us / one.estimate_us for one in rows])
    low, high = np.percentile(shares, [100 - BAND, BAND])
    median = float(np.median([one.error for one in rows]))
    return ErrorBand(median, max(0.0, 1 - float(low)), max(0.0, float(high) - 1), len(rows), kind)


def as_toml(fitted: Sequence[Fitted]) -> str:
    """The part of calibration.toml that is fitted."""
    lines = [
        f"# Fitted {date.today().isoformat()} by `benchmarks/kernel_estimate.py --static N --fit`",
        "# on Pallas kernels of tokamax 0.0.12 timed on real chips; the errors are those of shapes",
        "# that were left out of the fit.",
    ]
    for one in fitted:
        named = {one.chip: one.calibration}
        named.update((f"{one.chip}.kinds.{kind}", own) for kind, own in one.kinds.items())
        for name, constants in named.items():
            lines += [
                "",
                f"[{name}]",
                f"hbm_efficiency = {constants.hbm_efficiency:g}",
                f"compute_factor = {constants.compute_factor:g}",
                f"turn_cycles = {constants.turn_cycles:g}",
            ]
    for one in fitted:
        for band in one.errors:
            lines += [
                "",
                "[[errors]]",
                f'chip = "{one.chip}"',
                f'kind = "{band.kind}"',
                f"median = {band.median:.3f}",
                f"below = {band.below:.3f}",
                f"above = {band.above:.3f}",
                f"rows = {band.rows}",
            ]
    return "\n".join(lines) + "\n"

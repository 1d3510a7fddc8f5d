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
HBM_EFFICIENCIES = (0.75, 0.8, 0.85, 0.9, 0.95)
TURN_CYCLES = tuple(range(0, 801, 50))
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
    calibration, held_out = _fit(members)
    bands = [_band("any", held_out)]
    estimated: list[Estimated] = []
    kinds: dict[str, Calibration] = {}
    for kind in sorted({one.kind for one in members}):
        own = [number for number, one in enumerate(members) if one.kind == kind]
        timed = [held_out[number] for number in own]
        if len(own) >= LEAST_ROWS:
            kinds[kind], timed = _fit([members[number] for number in own])
            bands.append(_band(kind, timed))
        estimated += timed
    return Fitted(chip, calibration, kinds, tuple(estimated), tuple(bands))


def _fit(members: "Sequence[Followed]") -> tuple[Calibration, list[Estimated]]:
    """The constants with the smallest mean error, and each row's time without its own shape."""
    start = calibration_of("default")
    choices = [
        replace(start, compute_factor=factor, hbm_efficiency=efficiency)
        for factor, efficiency in product(COMPUTE_FACTORS, HBM_EFFICIENCIES)
    ]
    still = np.array([[one.time_us(choice) for choice in choices] for one in members])
    clock_hz = members[0].profile.chip.clock_ghz.require("fitting rates") * 1e9
    turning = np.array([one.turns for one in members]) * 1e6 / clock_hz
    measured = np.array([one.row.measured_us for one in members])
    times = still[:, :, None] + turning[:, None, None] * np.array(TURN_CYCLES)
    misses = np.abs(np.log(times / measured[:, None, None]))
    folds = np.array([one.row.fold for one in members])

    def best(rows: np.ndarray) -> tuple[int, int]:
        """The choice with the smallest mean error; the first one where there is no row."""
        place = int(misses[rows].mean(axis=0).argmin()) if rows.any() else 0
        return divmod(place, len(TURN_CYCLES))

    timed = np.empty(len(members))
    for fold in range(FOLDS):
        rate, turn = best(folds != fold)
        timed[folds == fold] = times[folds == fold, rate, turn]
    rate, turn = best(np.ones(len(members), dtype=bool))
    estimated = [Estimated(one.row, float(at)) for one, at in zip(members, timed, strict=True)]
    return replace(choices[rate], turn_cycles=float(TURN_CYCLES[turn])), estimated


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

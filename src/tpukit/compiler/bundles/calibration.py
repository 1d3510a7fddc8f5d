"""What turns a kernel's cycles into seconds, fitted on measured kernels, and how far it is off."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from ...hardware import Chip
from ...hardware.rates import ChipRates
from .trace import CallRates
from .units import core_of


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """The constants of one generation, as `data/calibration.toml` documents them.

    Attributes:
        hbm_efficiency: That of the chip's rates: kernels reach what other ops reach, so that both
            sides of a comparison with XLA are timed by one rate.
    """

    hbm_efficiency: float
    transfer_latency_s: float
    transfer_issue_cycles: float
    compute_factor: float
    turn_cycles: float
    launch_s: float

    def rates(self, chip: Chip) -> CallRates:
        """The rates of one device of `chip`."""
        needed = "timing kernels"
        hbm = chip.per_device(chip.hbm_gbps).require(needed) * 1e9
        clock_hz = chip.clock_ghz.require(needed) * 1e9
        peak = chip.per_device(chip.peak("bf16")).require(needed) * 1e12
        counted = core_of(chip.name).flops_per_cycle(chip.mxu_size.require(needed)) * clock_hz
        return CallRates(
            clock_hz=clock_hz,
            hbm_bytes_per_s=hbm * self.hbm_efficiency,
            transfer_latency_s=self.transfer_latency_s,
            transfer_issue_cycles=self.transfer_issue_cycles,
            compute_factor=self.compute_factor,
            product_factor=counted * chip.cores_per_device / peak,
            turn_cycles=self.turn_cycles,
            launch_s=self.launch_s,
        )


@dataclass(frozen=True)
class ErrorBand:
    """How far estimates were from measured kernels.

    Attributes:
        median: Of the absolute relative error.
        below: Nine in ten measured times were at least (1 - below) of the estimate.
        above: And at most (1 + above).
        kinds: How many kernels of each kind were measured; it says nothing of any other kind.
    """

    median: float
    below: float
    above: float
    kinds: Mapping[str, int]

    @property
    def rows(self) -> int:
        """Measured kernels behind it."""
        return sum(self.kinds.values())

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**vars(self), "kinds": dict(self.kinds), "rows": self.rows, "origin": "measured"}


def calibration_of(chip: str, kind: str | None = None) -> Calibration:
    """The constants fitted for a generation, and for a kind of op where it has its own."""
    tables = _tables()
    fitted: Mapping[str, Any] = tables.get(chip, {})
    own: Mapping[str, Any] = fitted.get("kinds", {}).get(kind or "", {})
    plain = {key: value for key, value in fitted.items() if key != "kinds"}
    default = Calibration(hbm_efficiency=ChipRates.of(chip).hbm_efficiency, **tables["default"])
    return replace(default, **{**plain, **own})


def error_of(chip: str, kind: str | None = None) -> ErrorBand | None:
    """How far estimates for a generation are off: of its kind where enough of it were measured.

    Where they were not, the band is that of all kinds that were, which its `kinds` name; None when
    nobody measured any.
    """
    found = error_bands_of(chip)
    own = [band for band in found if list(band.kinds) == [kind]]
    return max(own or found, key=lambda band: len(band.kinds), default=None)


def error_bands_of(chip: str) -> list[ErrorBand]:
    """All that is known of a generation: of its kinds together, and of each measured enough."""
    return [
        ErrorBand(row["median"], row["below"], row["above"], row["kinds"])
        for row in _tables()["errors"]
        if row["chip"] == chip
    ]


def describe_band(band: ErrorBand | None, kind: str | None) -> str:
    """How far the estimate of a kernel of a kind may be off, and what that stands on."""
    if band is None:
        return "not known: none measured"
    measured = ", ".join(f"{count} {name}" for name, count in band.kinds.items())
    shares = f"-{band.below:.0%} +{band.above:.0%}"
    if kind in band.kinds:
        return f"{shares} ({measured} measured)"
    return f"not known: no {kind or 'kernel like it'} measured ({measured}: {shares})"


@cache
def _tables() -> dict[str, Any]:
    text = (files("tpukit.compiler.bundles") / "data" / "calibration.toml").read_text()
    return tomllib.loads(text)

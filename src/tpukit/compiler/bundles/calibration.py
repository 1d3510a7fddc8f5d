"""What turns a kernel's cycles into seconds, fitted on measured kernels, and how far it is off."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from ...hardware import Chip
from .trace import CallRates


@dataclass(frozen=True)
class Calibration:
    """The constants of one generation, as `data/calibration.toml` documents them."""

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
        return CallRates(
            clock_hz=chip.clock_ghz.require(needed) * 1e9,
            hbm_bytes_per_s=hbm * self.hbm_efficiency,
            transfer_latency_s=self.transfer_latency_s,
            transfer_issue_cycles=self.transfer_issue_cycles,
            compute_factor=self.compute_factor,
            turn_cycles=self.turn_cycles,
            launch_s=self.launch_s,
        )


@dataclass(frozen=True)
class ErrorBand:
    """How far estimates were from measured kernels of one kind.

    Attributes:
        median: Of the absolute relative error.
        below: Nine in ten measured times were at least (1 - below) of the estimate.
        above: And at most (1 + above).
        rows: Measured kernels behind it.
        kind: The op class it was measured on; "any" where there was none of the kind itself.
    """

    median: float
    below: float
    above: float
    rows: int
    kind: str

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {**vars(self), "origin": "measured"}


def calibration_of(chip: str, kind: str | None = None) -> Calibration:
    """The constants fitted for a generation, and for a kind of op where it has its own."""
    tables = _tables()
    fitted: Mapping[str, Any] = tables.get(chip, {})
    own: Mapping[str, Any] = fitted.get("kinds", {}).get(kind or "", {})
    plain = {key: value for key, value in fitted.items() if key != "kinds"}
    return replace(Calibration(**tables["default"]), **{**plain, **own})


def error_of(chip: str, kind: str | None = None) -> ErrorBand | None:
    """How far estimates are off for a generation and kind of op; None when nobody measured."""
    found: dict[str, ErrorBand] = {}
    for row in _tables().get("errors", ()):
        if row["chip"] == chip:
            found[row["kind"]] = ErrorBand(
                row["median"], row["below"], row["above"], row["rows"], row["kind"]
            )
    return found.get(kind or "any", found.get("any"))


@cache
def _tables() -> dict[str, Any]:
    text = (files("tpukit.compiler.bundles") / "data" / "calibration.toml").read_text()
    return tomllib.loads(text)

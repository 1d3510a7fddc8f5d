"""A check beside an earlier one: what got worse, so that a team's tests can fail on it."""

from collections.abc import Sequence
from pathlib import Path

from ..errors import ConfigError
from ..hardware.figure import bytes_text, seconds_text
from .report.schema import Report, read_report
from .result import CheckResult

SLOWER = 0.05
"""The share by which a step may be slower than before."""


def find_regressions(
    result: CheckResult, baseline: Path, *, slower: float = SLOWER
) -> Sequence[str]:
    """Return what is worse than in an earlier report, one sentence each; empty where nothing is.

    Args:
        result: The check made now.
        baseline: What `tpukit check … --json` printed before.
        slower: The share by which the predicted step may be longer.

    Raises:
        ConfigError: The earlier report is of another slice.
        TPUValidationError: The file cannot be read, or is no report.
    """
    before = read_report(baseline)
    name = (before.get("slice") or {}).get("name")
    if name != str(result.compiled.slice):
        raise ConfigError(
            f"{baseline} is a check on {name}, but this one is on {result.compiled.slice}; "
            "compare checks on one slice, or make a new baseline."
        )
    found: list[str] = []
    if before.get("verdict") == "fits" and not result.fits:
        need = bytes_text(result.memory.total_bytes)
        had = bytes_text((before.get("memory") or {}).get("total_bytes") or 0)
        found.append(f"it no longer fits: {need} of HBM per device, {had} before [compiler]")
    earlier, now = _step_time_s(before), result.step_time_s
    if earlier is not None and now is None and result.fits:
        found.append(f"it has no predicted step any more: {result.no_prediction}")
    elif earlier is not None and now is not None and now > (1 + slower) * earlier:
        found.append(
            f"the predicted step takes {seconds_text(now)}, {seconds_text(earlier)} before "
            f"({now / earlier - 1:+.1%}, {slower:.0%} allowed) [model against model]"
        )
    return found


def _step_time_s(report: Report) -> float | None:
    """Return the time of all programs of one step."""
    capture = report.get("capture")
    if capture is not None:
        return capture["step_time_s"]["value"]
    prediction = report.get("prediction")
    return None if prediction is None else prediction["step_time_s"]

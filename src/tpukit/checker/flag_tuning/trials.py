"""What came of a search for compiler options: every trial, the best, and how to use it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...hardware import Slice
from ...hardware.figure import format_quantity
from ...shown import Shown
from ..result import DOES_NOT_FIT, FITS

TRIALS_SHOWN = 10
NOTE = (
    "Each was compiled as far as its schedule; times are predicted from that, none is measured. "
    "Time a few steps with and without before relying on it."
)


@dataclass(frozen=True, kw_only=True)
class FlagTrial:
    """One set of options and what the compiler made of it.

    Attributes:
        names: The candidates in it, "" when there are none: where the search started.
        options: All options, as one compile takes them.
        fits: What the compiler said; None when it refused the options.
        step_time_s: Predicted (origin model); None with `no_prediction` saying why.
        total_bytes: Of HBM, as the compiler reports it.
        caveats: What the prediction could not see.
        refusal: Why there is no answer, in the compiler's own words.
    """

    names: tuple[str, ...] = ()
    options: Mapping[str, Any]
    fits: bool | None = None
    step_time_s: float | None = None
    no_prediction: str = ""
    total_bytes: int | None = None
    caveats: tuple[str, ...] = ()
    refusal: str = ""

    @property
    def title(self) -> str:
        """The candidates in one line."""
        return ", ".join(self.names) or "as given"

    @property
    def outcome(self) -> str:
        """What came of it, in one line."""
        if self.refusal:
            return f"refused: {self.refusal}"
        size = f"{_size(self.total_bytes)} (compiler)"
        if self.step_time_s is None:
            return f"{'fits' if self.fits else 'does not fit'}, {size}"
        return f"step {self.step_time_s:.4g} s (model), {size}"

    @property
    def order(self) -> tuple[bool, float, int]:
        """Sorts the best first: those that fit by time, the others by memory."""
        endless = float("inf")
        seconds = endless if self.step_time_s is None else self.step_time_s
        return not self.fits, seconds, self.total_bytes or 2**62

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "candidates": list(self.names),
            "options": dict(self.options),
            "fits": self.fits,
            "step_time_s": {
                "value": self.step_time_s,
                "origin": "model",
                "reason": self.no_prediction,
            },
            "total_bytes": {"value": self.total_bytes, "origin": "compiler"},
            "caveats": list(self.caveats),
            "refusal": self.refusal,
        }


@dataclass(frozen=True, kw_only=True)
class FlagSearch(Shown):
    """A finished search.

    Attributes:
        baseline: The program with the options it started from.
        best: The best found; the baseline itself when nothing was better.
        trials: All that went to the compiler, in order, the baseline first.
        skipped: What was not tried or not chosen, and why.
        variables: The best options as environment variables: LIBTPU_INIT_ARGS and, rarely,
            XLA_FLAGS.
        flags: The best options as `tpukit check --flags` takes them.
        stopped: Why the search ended early, or "".
    """

    program: str
    slice: Slice
    baseline: FlagTrial
    best: FlagTrial
    trials: tuple[FlagTrial, ...]
    skipped: tuple[tuple[str, str], ...]
    variables: Mapping[str, str]
    flags: str
    stopped: str = ""

    @property
    def exit_code(self) -> int:
        """0 when the best fits, 3 when nothing does."""
        return FITS if self.best.fits else DOES_NOT_FIT

    @property
    def refused(self) -> tuple[FlagTrial, ...]:
        """The trials the compiler gave no answer to."""
        return tuple(trial for trial in self.trials if trial.refusal)

    @property
    def speedup(self) -> float | None:
        """Predicted step before over after; None when either is not known."""
        before, after = self.baseline.step_time_s, self.best.step_time_s
        return before / after if before and after else None

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "program": self.program,
            "slice": str(self.slice),
            "baseline": self.baseline.to_dict(),
            "best": self.best.to_dict(),
            "speedup": {"value": self.speedup, "origin": "model"},
            "variables": dict(self.variables),
            "flags": self.flags,
            "trials": [trial.to_dict() for trial in self.trials],
            "skipped": [{"what": what, "reason": reason} for what, reason in self.skipped],
            "stopped": self.stopped,
            "note": NOTE,
        }

    def __rich__(self) -> Any:
        """The best first, then the trials, then what the compiler refused."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        table = Table("", "options", "step (model)", "of before", "HBM (compiler)", box=None)
        answered = sorted((one for one in self.trials if not one.refusal), key=_order)
        for trial in answered[:TRIALS_SHOWN]:
            mark = "★" if trial is self.best else "✓" if trial.fits else "✗"
            share = _share(trial.step_time_s, self.baseline.step_time_s)
            table.add_row(mark, Text(trial.title), _seconds(trial), share, _size(trial.total_bytes))
        parts: list[Any] = [Text(self._headline, style="bold"), table]
        if len(answered) > TRIALS_SHOWN:
            parts.append(Text(f"and {len(answered) - TRIALS_SHOWN} slower", style="dim"))
        parts += [Text(f"refused {one.title}: {one.refusal}", "yellow") for one in self.refused]
        parts += [Text(f"left out {what}: {reason}", style="dim") for what, reason in self.skipped]
        if self.stopped:
            parts.append(Text(f"stopped early: {self.stopped}", style="yellow"))
        parts += [Text(f"note: {caveat}", style="yellow") for caveat in self.best.caveats]
        for name, value in self.variables.items():
            parts.append(Text(f"{name}='{value}'"))
        if self.flags:
            parts.append(Text(f"--flags '{self.flags}'"))
        return Group(*parts, Text(NOTE, style="dim"))

    @property
    def _headline(self) -> str:
        where = f"{self.program} on {self.slice}"
        if self.best is self.baseline:
            return f"nothing tried is better than the options as given for {where}"
        if not self.baseline.fits and self.best.fits:
            return f"{self.best.title} makes {where} fit"
        speedup = self.speedup
        if speedup is None or round(speedup, 3) <= 1:
            return f"{self.best.title} takes less memory for {where}"
        return f"{self.best.title}: predicted step {1 - 1 / speedup:.1%} shorter for {where}"


def _order(trial: FlagTrial) -> tuple[bool, float, int]:
    return trial.order


def _seconds(trial: FlagTrial) -> str:
    return "–" if trial.step_time_s is None else f"{trial.step_time_s:.4g} s"


def _share(seconds: float | None, before: float | None) -> str:
    return "–" if seconds is None or not before else f"{seconds / before:.1%}"


def _size(amount: int | None) -> str:
    return "–" if amount is None else format_quantity(amount, "B")

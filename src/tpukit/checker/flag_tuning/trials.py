"""The trials of a search for compiler options, and the best of them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...compiler.compiled import CompiledStep
from ...errors import TPUError
from ...exit_codes import ExitCode
from ...hardware import Slice
from ...hardware.figure import format_quantity
from ...plain_data import JsonMapping, JsonObject
from ...shown import Facts, Renderable, Shown

TRIALS_SHOWN = 10
NOTE = (
    "Each was compiled as far as its schedule; times are predicted from that, none is measured. "
    "Time a few steps with and without before relying on it."
)


@dataclass(frozen=True, kw_only=True)
class FlagTrial(Facts):
    """One set of options with its compiled result.

    Attributes:
        names: The candidates in it; empty for the initial options.
        options: All options of the compile.
        fits: Whether the program fits; None if the compiler refused the options.
        step_time_s: Predicted step time; None with a reason in `no_prediction`.
        total_bytes: HBM per device, from the compiler.
        caveats: Parts of the program that the prediction does not model.
        refusal: The compiler's error; "" if there was none.
    """

    names: tuple[str, ...] = ()
    options: JsonMapping
    fits: bool | None = None
    step_time_s: float | None = None
    no_prediction: str = ""
    total_bytes: int | None = None
    caveats: tuple[str, ...] = ()
    refusal: str = ""
    _facts = "candidates=names options fits caveats refusal"

    @property
    def title(self) -> str:
        """The candidates as one line."""
        return ", ".join(self.names) or "as given"

    @property
    def outcome(self) -> str:
        """The result as one line."""
        if self.refusal:
            return f"refused: {self.refusal}"
        size = f"{_size(self.total_bytes)} (compiler)"
        if self.step_time_s is None:
            return f"{'fits' if self.fits else 'does not fit'}, {size}"
        return f"step {self.step_time_s:.4g} s (model), {size}"

    @property
    def order(self) -> tuple[bool, float, int]:
        """Sort key, best first: trials that fit by time, the others by memory."""
        endless = float("inf")
        seconds = endless if self.step_time_s is None else self.step_time_s
        return not self.fits, seconds, self.total_bytes or 2**62

    def to_dict(self) -> JsonObject:
        """Return the trial as plain data."""
        return {
            **super().to_dict(),
            "step_time_s": {
                "value": self.step_time_s,
                "origin": "model",
                "reason": self.no_prediction,
            },
            "total_bytes": {"value": self.total_bytes, "origin": "compiler"},
        }


@dataclass(frozen=True, kw_only=True)
class FlagSearch(Shown):
    """The result of a search.

    Attributes:
        baseline: The trial of the initial options.
        best: The best trial; the baseline if no other is better.
        trials: All trials that were compiled, in order, the baseline first.
        skipped: Groups and candidates that were not tried or not chosen, each with the reason.
        variables: The best options as environment variables: LIBTPU_INIT_ARGS and, rarely,
            XLA_FLAGS.
        flags: The best options in the form of `tpukit check --flags`.
        stopped: Why the search ended early; "" if it did not.
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
    note = NOTE
    _facts = "program slice=slice.name baseline best variables flags trials stopped note"

    @property
    def exit_code(self) -> int:
        """0 if the best trial fits, otherwise 3."""
        return ExitCode.DONE if self.best.fits else ExitCode.DOES_NOT_FIT

    @property
    def refused(self) -> tuple[FlagTrial, ...]:
        """The trials that ended in an error."""
        return tuple(trial for trial in self.trials if trial.refusal)

    @property
    def speedup(self) -> float | None:
        """Predicted step time before divided by after; None if one is unknown."""
        before, after = self.baseline.step_time_s, self.best.step_time_s
        return before / after if before and after else None

    def to_dict(self) -> JsonObject:
        """Return the search as plain data."""
        return {
            **super().to_dict(),
            "speedup": {"value": self.speedup, "origin": "model"},
            "skipped": [{"what": what, "reason": reason} for what, reason in self.skipped],
        }

    def __rich__(self) -> Renderable:
        """Show the best trial first, then the others, then the refused ones."""
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


# Predicted times closer than this count as equal.
SMALLEST_GAIN = 0.005
SMALLEST_SAVING = 0.01  # of memory, where the time is equal


def judge(answer: CompiledStep | TPUError, trial: FlagTrial) -> FlagTrial:
    """Return a trial with its compiled result and predicted step."""
    if isinstance(answer, TPUError):
        return replace(trial, refusal=str(answer))
    try:
        found = replace(trial, fits=answer.fits, total_bytes=answer.memory.total_bytes)
        if not answer.fits:
            return replace(found, no_prediction="a program that does not fit takes no step")
        prediction = answer.predict()
    except TPUError as error:
        return replace(trial, refusal=str(error))
    return replace(found, step_time_s=prediction.step_time_s, caveats=prediction.caveats)


def in_one_step(parts: Sequence[FlagTrial], calls: Sequence[int]) -> FlagTrial:
    """Return one trial for a step of several programs: times add up, and every program must fit."""
    if len(parts) == 1 and calls[0] == 1:
        return parts[0]
    refused = next((one for one in parts if one.refusal), None)
    if refused is not None:
        return refused
    times = [
        None if one.step_time_s is None else one.step_time_s * count
        for one, count in zip(parts, calls, strict=True)
    ]
    known = [time for time in times if time is not None]
    return replace(
        parts[0],
        fits=all(one.fits for one in parts),
        step_time_s=sum(known) if len(known) == len(times) else None,
        no_prediction=next((one.no_prediction for one in parts if one.no_prediction), ""),
        total_bytes=max(one.total_bytes or 0 for one in parts),
        caveats=tuple(dict.fromkeys(caveat for one in parts for caveat in one.caveats)),
    )


def is_better(trial: FlagTrial, than: FlagTrial) -> bool:
    """Whether a trial fits where the other does not, is faster, or is smaller at the same time."""
    # Time that the prediction does not model is missing from it, which would look like a gain.
    if trial.refusal or len(trial.caveats) > len(than.caveats):
        return False
    if bool(trial.fits) != bool(than.fits):
        return bool(trial.fits)
    smaller = (trial.total_bytes or 0) < (1 - SMALLEST_SAVING) * (than.total_bytes or 0)
    if trial.step_time_s is None or than.step_time_s is None:
        return smaller
    if trial.step_time_s < (1 - SMALLEST_GAIN) * than.step_time_s:
        return True
    return smaller and trial.step_time_s <= than.step_time_s

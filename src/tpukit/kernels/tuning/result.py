"""The result of a search for block sizes: all trials, the choice, and its entry as data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from ...plain_data import JsonObject
from ...shown import Shown
from ..blocks.tuned import TunedEntry, data_folder, load_tuned, save_tuned
from ..registry.op import Blocks
from ..timing.estimating import format_time

Origin = Literal["measured", "model"]


@dataclass(frozen=True)
class Trial:
    """One choice of blocks.

    Attributes:
        blocks: The sizes.
        forward_s: Time of the forward pass; None if it was refused.
        gradient_s: Time of both passes together; None where it was not timed.
        error: Why it was refused.
    """

    blocks: Blocks
    forward_s: float | None
    gradient_s: float | None = None
    error: str = ""

    def to_dict(self) -> JsonObject:
        """Return the trial as plain data."""
        return {
            "blocks": self.blocks.to_dict(),
            "forward_s": self.forward_s,
            "gradient_s": self.gradient_s,
            "error": self.error,
        }


@dataclass(frozen=True)
class TuningResult(Shown):
    """The best blocks of one op for one case on one generation.

    Attributes:
        op: The op.
        case: The case.
        chip: The generation.
        bucket: The shapes the choice applies to.
        origin: Origin of the times.
        chosen: The trial whose blocks are taken.
        default: The trial of the default blocks.
        trials: All trials.
        too_large: Candidates that did not fit in VMEM and were not compiled.
        left: Choices that were not tried within the time budget.
        error: The error of such times, in words.
    """

    op: str
    case: str
    bucket: str
    chip: str
    origin: Origin
    chosen: Trial
    default: Trial
    trials: tuple[Trial, ...] = field(repr=False)
    too_large: int
    left: int
    error: str
    versions: Mapping[str, str] = field(repr=False)

    @property
    def gain(self) -> float:
        """How many times faster the forward pass is than with the default blocks."""
        if self.default.forward_s is None or self.chosen.forward_s is None:
            return 1.0
        return self.default.forward_s / self.chosen.forward_s

    def entry(self) -> TunedEntry:
        """The entry that dispatch reads."""
        time_us = _microseconds(self.chosen.forward_s)
        assert time_us is not None  # only a trial with a time is chosen
        return TunedEntry(
            bucket=self.bucket,
            blocks=self.chosen.blocks.to_dict(),
            time_us=time_us,
            default_us=_microseconds(self.default.forward_s),
            tried=len(self.trials),
            origin=self.origin,
            versions=dict(self.versions),
        )

    def save(self, folder: Path | None = None) -> Path:
        """Write the choice to the data beside the op, replacing an earlier one of its bucket."""
        place = folder or data_folder(self.op)
        entries = {**load_tuned(place, self.chip), self.bucket: self.entry()}
        return save_tuned(place, self.chip, entries)

    def to_dict(self) -> JsonObject:
        """Return the result as plain data."""
        return {
            "op": self.op,
            "case": self.case,
            "bucket": self.bucket,
            "chip": self.chip,
            "origin": self.origin,
            "error": self.error,
            "chosen": self.chosen.to_dict(),
            "default": self.default.to_dict(),
            "gain": self.gain,
            "too_large": self.too_large,
            "left": self.left,
            "trials": [trial.to_dict() for trial in self.trials],
            "versions": dict(self.versions),
        }

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        head = (
            f"{self.op} {self.case} on {self.chip}: {_text(self.chosen.blocks)}, "
            f"{format_time(self.chosen.forward_s)} against {format_time(self.default.forward_s)} "
            f"by default ({self.gain:.2f}x)  (origin: {self.origin}, error {self.error})"
        )
        table = Table("blocks", "forward", "both passes", box=None, pad_edge=False)
        timed = sorted(
            (trial for trial in self.trials if trial.forward_s is not None),
            key=lambda trial: (trial.forward_s or 0.0, trial.gradient_s or 0.0),
        )
        for trial in timed[:8]:
            table.add_row(
                _text(trial.blocks), format_time(trial.forward_s), format_time(trial.gradient_s)
            )
        refused = len(self.trials) - len(timed)
        foot = (
            f"{len(timed)} tried, {refused} refused, {self.too_large} too large for VMEM, "
            f"{self.left} left for want of time"
        )
        return Group(Text(head, style="bold"), table, Text(foot, style="dim"))


def _text(blocks: Blocks) -> str:
    return " ".join(f"{name}={value}" for name, value in blocks.to_dict().items())


def _microseconds(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e6, 3)

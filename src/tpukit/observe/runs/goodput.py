"""Goodput of a run across its restarts: productive time over wall time, and the rest by cause.

Wall time is from the beginning of the first attempt to the newest event or step of the last one. An
attempt that begins at step S discards every later step of the attempts before it, so the time of
those steps is lost. Time between attempts is "restart"; time without a cause is "other". So the
parts add up.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from ...plain_data import JsonObject
from ...records.attempts import RunAttempt
from ...records.ledger import Goodput
from ...shown import Shown

# The cause's label, and its name in Google's ml-goodput-measurement (BadputType).
CAUSES = {
    "initialise": ("initialise", "TRAINING_PREP"),
    "compile": ("compile", "PROGRAM_STARTUP"),
    "restore": ("restore a checkpoint", "UNPRODUCTIVE_CHECKPOINT_RESTORE_TIME"),
    "input_stall": ("wait for input", "DATA_LOADING_SYNC"),
    "checkpoint": ("save a checkpoint", "UNPRODUCTIVE_CHECKPOINT_SAVE_TIME"),
    "evaluate": ("evaluate", "CUSTOM_BADPUT_EVENTS"),
    "lost": ("lost steps", "WASTED_PROGRESS_FROM_DISRUPTION"),
    "restart": ("restart", "INFRASTRUCTURE_RECOVERY_FROM_DISRUPTION"),
    "other": ("other", "OTHER"),
}


@dataclass(frozen=True)
class RunGoodput(Shown):
    """The time of a run by cause, over all attempts (origin: measured).

    Attributes:
        total: Over all attempts; its `spent_s` has every cause, with "restart" and "other".
        attempts: Number of attempts.
        lost_steps: Steps that a kill or rollback discarded.
    """

    total: Goodput
    attempts: int
    lost_steps: int

    @property
    def share(self) -> float | None:
        """Productive over wall time; None before any time has passed."""
        return self.total.share

    @property
    def badput_s(self) -> dict[str, float]:
        """Seconds by cause, the most first."""
        return dict(sorted(self.total.spent_s.items(), key=lambda entry: -entry[1]))

    def to_dict(self) -> JsonObject:
        """Return plain data; `badput` also has the names of ml-goodput-measurement."""
        return {
            **self.total.to_dict(),
            "attempts": self.attempts,
            "lost_steps": self.lost_steps,
            "badput": [
                {
                    "cause": cause,
                    "label": label_of(cause),
                    "ml_goodput_name": CAUSES.get(cause, ("", "OTHER"))[1],
                    "seconds": seconds,
                }
                for cause, seconds in self.badput_s.items()
            ],
        }

    def __str__(self) -> str:
        return f"{self.total}, {self.attempts} attempt{'s' * (self.attempts != 1)}"

    def __rich__(self) -> Table:
        share = "–" if self.share is None else f"{self.share:.1%}"
        table = Table(title=f"goodput {share} of {self.total.wall_s:,.1f} s (measured)")
        table.title_justify = "left"
        table.add_column("where the time went")
        table.add_column("seconds", justify="right")
        table.add_column("share", justify="right")
        rows = {"steps that count": self.total.productive_s}
        rows |= {label_of(cause): seconds for cause, seconds in self.badput_s.items()}
        for name, seconds in rows.items():
            of_all = f"{seconds / self.total.wall_s:.1%}" if self.total.wall_s else "–"
            table.add_row(name, f"{seconds:,.1f}", of_all)
        table.caption = f"{self.attempts} attempts, {self.lost_steps} steps lost"
        return table


def label_of(cause: str) -> str:
    """Return the label of a cause."""
    return CAUSES[cause][0] if cause in CAUSES else cause.replace("_", " ")


def goodput_of(attempts: Sequence[RunAttempt]) -> RunGoodput:
    """Add up the attempts of a run."""
    kept_s = [attempt.productive_s for attempt in attempts]
    kept_to = [attempt.step for attempt in attempts]
    spent: dict[str, float] = {}
    wall_s = lost_s = restart_s = 0.0
    lost_steps = 0
    for at, attempt in enumerate(attempts):
        wall_s += attempt.wall_s
        booked = attempt.productive_s + sum(attempt.spent_s.values())
        for what, seconds in attempt.spent_s.items():
            spent[what] = spent.get(what, 0.0) + seconds
        spent["other"] = spent.get("other", 0.0) + attempt.wall_s - booked
        lost_steps += attempt.steps_rolled_back
        if at:
            restart_s += attempt.gap_s(attempts[at - 1])
        for before in reversed(range(at)):
            earlier = attempts[before]
            kept = min(kept_s[before], earlier.productive_up_to(attempt.first_step))
            lost_s += kept_s[before] - kept
            lost_steps += max(0, kept_to[before] - max(attempt.first_step, earlier.first_step))
            kept_s[before] = kept
            kept_to[before] = min(kept_to[before], max(attempt.first_step, earlier.first_step))
            if earlier.first_step <= attempt.first_step:
                break  # earlier attempts end where this one began
    spent["lost"] = spent.get("lost", 0.0) + lost_s
    spent["restart"] = spent.get("restart", 0.0) + restart_s
    ordered = {cause: spent.pop(cause) for cause in CAUSES if cause in spent}
    total = Goodput(
        wall_s=wall_s + restart_s,
        productive_s=sum(kept_s),
        spent_s={cause: seconds for cause, seconds in {**ordered, **spent}.items() if seconds > 0},
    )
    return RunGoodput(total, len(attempts), lost_steps)

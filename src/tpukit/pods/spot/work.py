"""What a job does between two preemptions: its step, its saves, its restarts."""

from dataclasses import dataclass

from ...hardware import Figure
from ...runtime.ranges import Range

_SECONDS = Range(0, 86_400)
_ASSUMED = "assumed, as nothing was measured; give your own with with_work()"
_NO_STEP = Figure.missing("s", "no step was measured; with_work(step_s=…)")
_SAVE = Figure(30.0, "s", "model", f"saves of 30 s are {_ASSUMED}")
_RESTART = Figure(60.0, "s", "model", f"restarts of 60 s are {_ASSUMED}")


def given(seconds: float | Figure, what: str) -> Figure:
    """Return seconds as a figure; a plain number is the user's."""
    if isinstance(seconds, Figure):
        return seconds
    return Figure(_SECONDS.check(what, seconds, unit="seconds"), "s", "user", what)


@dataclass(frozen=True, kw_only=True)
class Work:
    """How long the parts of a job take.

    Attributes:
        step_s: One step; missing where it is not known, and then an hour of them is priced.
        save_s: For which a checkpoint holds the steps up.
        restart_s: From a ready pod to the next step: processes, restore, compile.
    """

    step_s: Figure = _NO_STEP
    save_s: Figure = _SAVE
    restart_s: Figure = _RESTART

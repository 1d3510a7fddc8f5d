"""Numbers as the dashboard shows them: value, unit, where it comes from, or why there is none."""

from pathlib import Path
from typing import Any

from ...hardware.figure import seconds_text
from ...hardware.missing import Measured, Missing, plain
from ...records.events import good_saves
from ..runs import Run, RunSummary
from ..runs.goodput import goodput_of
from ..runs.summary import summarise


def shown(
    key: str,
    title: str,
    value: Measured | None,
    *,
    unit: str = "",
    origin: str = "measured",
    below: str = "",
    reason: str = "nobody wrote it down",
) -> dict[str, Any]:
    """Return one number with its provenance, as cards and tables of the page take it."""
    why = value.reason if isinstance(value, Missing) else reason
    number = None if value is None else plain(value)
    return {
        "key": key,
        "title": title,
        "value": number,
        "unit": unit,
        "below": below,
        **({"origin": origin} if number is not None else {"reason": why}),
    }


def summary_view(name: str, run: Run) -> dict[str, Any]:
    """Return how a run is doing, with the figures that are asked for first."""
    found = run.summary()
    return {
        "name": name,
        "path": _from_here(run.path),
        "state": found.state,
        "state_in_words": found.state_in_words,
        "last_seen": found.last_seen,
        "slice": found.slice,
        "device_kind": found.device_kind,
        "chips": found.chips,
        "attempts": found.attempts,
        "problem": found.problem,
        "saved_at": _saved_at(run),
        "figures": {one["key"]: one for one in _figures(found)},
    }


def problem_view(name: str, path: Path, problem: str) -> dict[str, Any]:
    """Return a run of which nothing can be told but what is wrong with it."""
    nothing = summarise(path, (), (), goodput_of(()), now=0.0, problem=problem, steps=())
    return {
        "name": name,
        "path": _from_here(path),
        "state": nothing.state,
        "state_in_words": nothing.state_in_words,
        "last_seen": None,
        "slice": None,
        "device_kind": "",
        "chips": None,
        "attempts": 0,
        "problem": problem,
        "saved_at": None,
        "figures": {one["key"]: one for one in _figures(nothing)},
    }


def ratio_of_prediction(found: RunSummary) -> Measured:
    """Return the measured step over the predicted one, or why it cannot be told."""
    for value in (found.step_time_p50_s, found.predicted_step_s):
        if isinstance(value, Missing):
            return value
    return found.step_time_p50_s / found.predicted_step_s


def _figures(found: RunSummary) -> list[dict[str, Any]]:
    of = "" if found.total_steps is None else f"of {found.total_steps:,}"
    ratio = ratio_of_prediction(found)
    against = "" if isinstance(ratio, Missing) else f"measured is {ratio:.2f} × predicted"
    p99 = found.step_time_p99_s
    return [
        shown("step", "Step", found.step, below=of),
        shown("total_steps", "Steps in all", found.total_steps, origin="user"),
        shown("loss", "Loss", found.loss, below="of the newest step"),
        shown(
            "step_time",
            "Step time",
            found.step_time_p50_s,
            unit="s",
            below="" if isinstance(p99, Missing) else f"median; p99 {seconds_text(p99)}",
        ),
        shown("step_time_p99", "Step time, p99", p99, unit="s"),
        shown(
            "predicted_step",
            "Predicted step",
            found.predicted_step_s,
            unit="s",
            origin="model",
            below=against,
        ),
        shown("ratio", "Measured ÷ predicted step", ratio, origin="model"),
        shown("mfu", "MFU", found.mfu, unit="share", below=found.mfu_convention),
        shown(
            "tokens_per_s_per_chip",
            "Tokens/s/chip",
            found.tokens_per_s_per_chip,
            below="" if found.chips is None else f"{found.chips:,} chip{'s' * (found.chips != 1)}",
        ),
        shown(
            "goodput",
            "Goodput",
            found.goodput,
            unit="share",
            below=f"{found.attempts} attempt{'s' * (found.attempts != 1)}",
        ),
        shown(
            "checkpoint",
            "Checkpoint",
            found.checkpoint_step,
            below="step saved",
            reason="none was saved",
        ),
    ]


def _from_here(path: Path) -> str:
    """The path as one would type it where the dashboard was started."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def _saved_at(run: Run) -> float | None:
    saved = good_saves(run.events())
    return saved[-1].time if saved else None

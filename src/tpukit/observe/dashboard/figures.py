"""The figures of one run or of two side by side: value, unit, origin, or why there is none."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from ...hardware.figure import count_text, seconds_text
from ...hardware.missing import Measured, Missing, plain
from ...plain_data import JsonMapping, JsonObject, parse_json
from ...records.events import good_saves
from ...records.mirror import address_of
from ...records.names import IDENTITY_FILE, MFU, TOKENS_RATE
from ...runtime.plain_files import read_plain
from ..runs import Run, RunSummary
from ..runs.goodput import goodput_of
from ..runs.summary import LARGEST_IDENTITY, summarise


def shown(
    key: str,
    title: str,
    value: Measured | None,
    *,
    unit: str = "",
    origin: str = "measured",
    below: str = "",
    reason: str = "it was not recorded",
) -> JsonObject:
    """Return one number with unit and origin, for cards and tables of the page."""
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


def summary_view(name: str, run: Run) -> JsonObject:
    """Return the state and main figures of a run."""
    saved = good_saves(run.events())
    return _view(name, run.path, run.summary(), saved[-1].time if saved else None)


def problem_view(name: str, path: Path, problem: str) -> JsonObject:
    """Return the view of a run that cannot be read."""
    nothing = summarise(path, (), (), goodput_of(()), now=0.0, problem=problem, steps=())
    return _view(name, path, nothing, None)


def _view(name: str, path: Path, summary: RunSummary, saved_at: float | None) -> JsonObject:
    return {
        "name": name,
        "path": _from_here(path),
        "state": summary.state,
        "state_in_words": summary.state_in_words,
        "last_seen": summary.last_seen,
        "slice": summary.slice,
        "device_kind": summary.device_kind,
        "chips": summary.chips,
        "attempts": summary.attempts,
        "problem": summary.problem,
        "saved_at": saved_at,
        "figures": {figure["key"]: figure for figure in _figures(summary)},
    }


def ratio_of_prediction(summary: RunSummary) -> Measured:
    """Return the measured step over the predicted one, or why there is none."""
    for value in (summary.step_time_p50_s, summary.predicted_step_s):
        if isinstance(value, Missing):
            return value
    return summary.step_time_p50_s / summary.predicted_step_s


def _figures(summary: RunSummary) -> list[JsonObject]:
    of_total = "" if summary.total_steps is None else f"of {summary.total_steps:,}"
    ratio = ratio_of_prediction(summary)
    against = "" if isinstance(ratio, Missing) else f"measured is {ratio:.2f} × predicted"
    p99 = summary.step_time_p99_s
    return [
        shown("step", "Step", summary.step, below=of_total),
        shown("total_steps", "Steps in all", summary.total_steps, origin="user"),
        shown("loss", "Loss", summary.loss, below="of the newest step"),
        shown(
            "step_time",
            "Step time",
            summary.step_time_p50_s,
            unit="s",
            below="" if isinstance(p99, Missing) else f"median; p99 {seconds_text(p99)}",
        ),
        shown("step_time_p99", "Step time, p99", p99, unit="s"),
        shown(
            "predicted_step",
            "Predicted step",
            summary.predicted_step_s,
            unit="s",
            origin="model",
            below=against,
        ),
        shown("ratio", "Measured ÷ predicted step", ratio, origin="model"),
        shown(MFU, "MFU", summary.mfu, unit="share", below=summary.mfu_convention),
        shown(
            TOKENS_RATE,
            "Tokens/s/chip",
            summary.tokens_per_s_per_chip,
            below=""
            if summary.chips is None
            else f"{summary.chips:,} chip{'s' * (summary.chips != 1)}",
        ),
        shown(
            "goodput",
            "Goodput",
            summary.goodput,
            unit="share",
            below=count_text(summary.attempts, "attempt"),
        ),
        shown(
            "checkpoint",
            "Checkpoint",
            summary.checkpoint_step,
            below="step saved",
            reason="none was saved",
        ),
    ]


def _from_here(path: Path) -> str:
    """Return the path relative to the working directory, where it is inside; or its address."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else address_of(path)


COMPARED = (
    *("step", "loss", "step_time", "step_time_p99", "predicted_step", "ratio"),
    *(MFU, TOKENS_RATE, "goodput"),
)


def compared(name: str, run: Run) -> JsonObject:
    """Return the figures and settings of one run for a comparison."""
    return {"summary": summary_view(name, run), "settings": settings_of(run)}


def compare_view(a: JsonMapping, b: JsonMapping) -> JsonObject:
    """Return the different and the same settings of two runs, and the figures of both."""
    first, second = a["settings"], b["settings"]
    keys = list(dict.fromkeys((*first, *second)))
    figures = [[run["summary"]["figures"][key] for run in (a, b)] for key in COMPARED]
    return {
        "a": a["summary"],
        "b": b["summary"],
        "settings": [
            {"key": key, "a": first.get(key), "b": second.get(key)}
            for key in keys
            if first.get(key) != second.get(key)
        ],
        "same": [
            {"key": key, "a": first[key]} for key in keys if first.get(key) == second.get(key)
        ],
        "figures": [
            {"title": before["title"], "a": before, "b": after, "ratio": _ratio(before, after)}
            for before, after in figures
        ],
    }


def _ratio(before: JsonMapping, after: JsonMapping) -> float | None:
    """Return the second number over the first, where both exist."""
    first, other = before["value"], after["value"]
    return other / first if first and other is not None else None


def settings_of(run: Run) -> dict[str, str]:
    """Return the values of run.json by the path of their keys; {} if damaged."""
    try:
        text = read_plain(run.path / IDENTITY_FILE, inside=run.path, at_most=LARGEST_IDENTITY)
        document: Any = parse_json(text)
    except (OSError, ValueError):
        return {}
    if not isinstance(document, dict):
        return {}
    parts = cast("JsonObject", document)
    return {
        path: text
        for part in ("identity", "recipe", "settings")
        for path, text in _flat(parts.get(part), part).items()
    }


def _flat(value: Any, path: str) -> dict[str, str]:
    if isinstance(value, Mapping) and value:
        inside = cast("JsonMapping", value)
        return {
            key: text
            for name, entry in inside.items()
            for key, text in _flat(entry, f"{path}.{name}").items()
        }
    return {path: value if isinstance(value, str) else json.dumps(value)}

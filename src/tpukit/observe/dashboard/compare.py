"""Two runs side by side: what was set differently first, then what came of it."""

import json
from collections.abc import Mapping
from typing import Any, cast

from ...plain_data import parse_json
from ...runtime.plain_files import read_plain
from ...runtime.run_files import IDENTITY_FILE
from ..runs import Run
from ..runs.summary import LARGEST_IDENTITY
from .figures import summary_view

COMPARED = (
    *("step", "loss", "step_time", "step_time_p99", "predicted_step", "ratio"),
    *("mfu", "tokens_per_s_per_chip", "goodput"),
)


def compared(name: str, run: Run) -> dict[str, Any]:
    """Return what is compared of one run."""
    return {"summary": summary_view(name, run), "settings": settings_of(run)}


def compare_view(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of two runs that differ, those that do not, and the figures of both."""
    one, other = a["settings"], b["settings"]
    keys = list(dict.fromkeys((*one, *other)))
    figures = [[run["summary"]["figures"][key] for run in (a, b)] for key in COMPARED]
    return {
        "a": a["summary"],
        "b": b["summary"],
        "settings": [
            {"key": key, "a": one.get(key), "b": other.get(key)}
            for key in keys
            if one.get(key) != other.get(key)
        ],
        "same": [{"key": key, "a": one[key]} for key in keys if one.get(key) == other.get(key)],
        "figures": [
            {"title": before["title"], "a": before, "b": after, "ratio": _ratio(before, after)}
            for before, after in figures
        ],
    }


def _ratio(before: Mapping[str, Any], after: Mapping[str, Any]) -> float | None:
    """Return the second number over the first, where both are there."""
    one, other = before["value"], after["value"]
    return other / one if one and other is not None else None


def settings_of(run: Run) -> dict[str, str]:
    """Return what run.json says, each value under the path of its keys; {} if damaged."""
    try:
        text = read_plain(run.path / IDENTITY_FILE, inside=run.path, at_most=LARGEST_IDENTITY)
        document: Any = parse_json(text)
    except (OSError, ValueError):
        return {}
    if not isinstance(document, dict):
        return {}
    parts = cast("dict[str, Any]", document)
    return {
        path: text
        for part in ("identity", "recipe", "settings")
        for path, text in _flat(parts.get(part), part).items()
    }


def _flat(value: Any, path: str) -> dict[str, str]:
    if isinstance(value, Mapping) and value:
        inside = cast("Mapping[str, Any]", value)
        return {
            key: text
            for name, one in inside.items()
            for key, text in _flat(one, f"{path}.{name}").items()
        }
    return {path: value if isinstance(value, str) else json.dumps(value)}

"""Plans and checks in JSON files: a list of them, and each as its page."""

from typing import Any, cast

from ...checker.report.html import render_html
from ...checker.report.schema import as_report
from ...errors import TPUValidationError
from ...job.hidden import hide_in_object
from ...plain_data import JsonMapping, JsonObject, parse_json
from ...planner.answer.page import render_page
from ...planner.answer.result import RecordedPlan
from ...runtime.plain_files import read_plain
from .library import LARGEST_DOCUMENT, KeptDocument


def read_document(document: KeptDocument) -> JsonObject:
    """Return the content of a file.

    Raises:
        TPUValidationError: It cannot be read.
    """
    try:
        path = document.path
        text = read_plain(path, inside=path.parent, at_most=LARGEST_DOCUMENT)
        data: Any = parse_json(text, object_hook=hide_in_object)
    except (OSError, ValueError) as error:
        raise TPUValidationError(f"{document.path.name} cannot be read ({error}).") from None
    if not isinstance(data, dict):
        raise TPUValidationError(f"{document.path.name} contains no JSON object.")
    return cast("JsonObject", data)


def page_of(document: KeptDocument) -> str:
    """Return the self-contained page of a plan or a check."""
    data = read_document(document)
    if document.kind == "plan":
        return render_page(RecordedPlan.from_dict(data, name=document.path.name))
    return render_html(as_report(data, name=document.path.name))


def row_of(name: str, document: KeptDocument) -> JsonObject:
    """Return an entry of the list, with subject and verdict."""
    row: JsonObject = {"name": name, "written_at": document.stamp[1]}
    try:
        data = read_document(document)
        about = _plan_row(data) if document.kind == "plan" else _check_row(data)
    except (TPUValidationError, KeyError, TypeError, AttributeError, IndexError) as error:
        return {**row, "problem": str(error) or type(error).__name__}
    return {**row, **about}


def _plan_row(data: JsonMapping) -> JsonObject:
    best = data["choices"][0] if data["choices"] else None
    return {
        "about": data["model"],
        "verdict": "meets the limits" if data["feasible"] else "not as asked",
        "good": data["feasible"],
        "slice": best and best["slice"],
        "step": best and {"value": best["step_time_s"], "unit": "s", "origin": best["step_origin"]},
        "cost": best and best["usd"],
        "choices": [_choice(choice) for choice in (*data["choices"], *data["pareto_front"])],
    }


def _choice(choice: JsonMapping) -> JsonObject:
    return {
        "slice": choice["slice"],
        "days": choice["days"],
        "usd": choice["usd"]["value"],
        "step_time_s": choice["step_time_s"],
        "origin": choice["usd"].get("origin", "model"),
    }


def _check_row(data: JsonMapping) -> JsonObject:
    prediction = data.get("prediction")
    return {
        "about": data.get("program", ""),
        "verdict": data.get("verdict", "could not tell"),
        "good": data.get("verdict") == "fits",
        "slice": (data.get("slice") or {}).get("name"),
        "step": prediction and {"value": prediction["step_time_s"], "unit": "s", "origin": "model"},
        "memory": data.get("memory")
        and {"value": data["memory"]["total_bytes"], "unit": "B", "origin": "compiler"},
    }

"""Read a report from a file, and say in one sentence when it is none."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, cast

from pydantic import TypeAdapter, ValidationError

from ...compiler.timeline import Span
from ...errors import TPUValidationError
from .schema import SCHEMA, Report

_MAKE_ONE = "make one with `tpukit check … --json > report.json`."


def read_report(path: Path) -> Report:
    """Read what `tpukit check --json` wrote.

    Raises:
        TPUValidationError: The file cannot be read, is no report, or is of another version.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TPUValidationError(f"{path} cannot be read ({error.strerror}); {_MAKE_ONE}") from None
    except (ValueError, RecursionError) as error:
        raise TPUValidationError(f"{path} is not JSON ({error}); {_MAKE_ONE}") from None
    return as_report(data, name=str(path))


def as_report(data: object, *, name: str = "the report") -> Report:
    """Accept plain data as a report, or say why it is none."""
    if not isinstance(data, Mapping) or "schema" not in data:
        raise TPUValidationError(f"{name} is JSON but no report of a check; {_MAKE_ONE}")
    found = cast("Mapping[str, Any]", data)
    if found["schema"] != SCHEMA:
        raise TPUValidationError(
            f"{name} has the format {found['schema']!r} and this tpukit reads {SCHEMA!r}; "
            "run the check again with the version that reads it."
        )
    try:
        TypeAdapter(Report).validate_python(found)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(map(str, problem["loc"]))
        raise TPUValidationError(
            f"{name} is damaged: {where} is {problem['input']!r:.60}; {_MAKE_ONE}"
        ) from None
    return cast("Report", dict(found))


@dataclass(frozen=True)
class RecordedStep:
    """A predicted step as a report remembers it: enough for a trace."""

    name: str
    spans: tuple[Span, ...]

    @classmethod
    def of(cls, report: Report) -> "RecordedStep":
        """The step of a report; without spans where there was no prediction."""
        target = (report.get("slice") or {}).get("name", "an unnamed slice")
        name = f"{report.get('program', 'program')} on {target}, one device, predicted"
        return cls(name, spans_of(report))


def spans_of(report: Report) -> tuple[Span, ...]:
    """The spans of a report as objects, in their order."""
    known = {entry.name for entry in fields(Span)}
    try:
        return tuple(
            Span(**{name: value for name, value in entry.items() if name in known})
            for entry in report.get("spans") or ()
        )
    except (TypeError, AttributeError) as error:
        raise TPUValidationError(
            f"a span of the report lacks what every span has ({error}); run the check again."
        ) from None

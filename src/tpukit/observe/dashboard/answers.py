"""Requests and responses of the dashboard: checked query settings, JSON, refusals."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, cast

from starlette.responses import Response

from ...errors import did_you_mean
from ...plain_data import JsonObject
from .run_views import Window

_NEVER_STORED = {"cache-control": "no-store"}


def encoded(data: Any) -> bytes:
    """Return JSON as bytes; NaN and infinity become null."""
    try:
        text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(data), separators=(",", ":"), allow_nan=False)
    return text.encode()


def answer(body: bytes, *, status: int = 200) -> Response:
    """Return a JSON response that browsers do not cache."""
    return Response(body, status, _NEVER_STORED, "application/json")


def refusal(status: int, error: str, way_out: str) -> Response:
    """Return an error and its fix as a JSON response."""
    return answer(encoded({"error": error, "way_out": way_out}), status=status)


@cache
def assets_folder() -> Path:
    """Return the folder of the front end's files."""
    return Path(str(files("tpukit.observe.dashboard") / "assets"))


def _finite(data: Any) -> Any:
    if isinstance(data, float):
        return data if math.isfinite(data) else None
    if isinstance(data, dict):
        return {key: _finite(value) for key, value in cast("JsonObject", data).items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in cast("list[Any]", data)]
    return data


MOST_POINTS = 20_000
USUAL_POINTS = 1000
MOST_METRICS = 16
LONGEST_NAME = 400
AXES = ("step", "time")


class BadQuery(Exception):
    """A query is not valid; the message names valid values."""


@dataclass(frozen=True)
class Query:
    """The settings of one request."""

    given: Mapping[str, str]

    def only(self, *names: str) -> None:
        """Raise for any other setting, so that a misspelled one is not ignored."""
        for name in self.given:
            if name not in names:
                known = f"known are {', '.join(names)}" if names else "none is known here"
                raise BadQuery(
                    f"there is no setting {name!r:.60}; {known}{did_you_mean(name, names)}"
                )

    def text(self, name: str) -> str | None:
        """Return a text setting, or None."""
        value = self.given.get(name)
        if value is not None and not 0 < len(value) <= LONGEST_NAME:
            raise BadQuery(f"{name} has {len(value)} characters; write 1 to {LONGEST_NAME}")
        return value

    def needed(self, name: str) -> str:
        """Return a required text setting."""
        value = self.text(name)
        if value is None:
            raise BadQuery(f"{name} is missing; add {name}=…")
        return value

    def metrics(self) -> tuple[str, ...]:
        """Return the requested metrics."""
        names = tuple(self.needed("metrics").split(","))
        if len(names) > MOST_METRICS:
            raise BadQuery(f"{len(names)} metrics at once; request at most {MOST_METRICS}")
        return names

    def window(self) -> Window:
        """Return the requested part of series, and its number of points."""
        by = self.given.get("by", "step")
        if by != "step" and by != "time":
            raise BadQuery(f"by is {by!r:.40}; write one of {', '.join(AXES)}")
        points = self._whole("points", most=MOST_POINTS)
        return Window(
            points=USUAL_POINTS if points is None else max(8, points),
            by=by,
            start=self._number("start"),
            end=self._number("end"),
            process=self._whole("process", most=2**31),
            chip=self._whole("chip", most=2**31),
        )

    def _whole(self, name: str, *, most: int) -> int | None:
        value = self.given.get(name)
        if value is None:
            return None
        if not (value.isascii() and value.isdecimal() and len(value) < 20 and int(value) <= most):
            raise BadQuery(f"{name} is {value!r:.40}; write a whole number from 0 to {most}")
        return int(value)

    def _number(self, name: str) -> float | None:
        value = self.given.get(name)
        if value is None:
            return None
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise BadQuery(f"{name} is {value!r:.40}; write a number")
        return number

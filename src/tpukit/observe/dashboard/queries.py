"""What is asked for behind the question mark, checked: names, ranges and counts."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ...errors import did_you_mean
from .run_views import Window

MOST_POINTS = 20_000
USUAL_POINTS = 1000
MOST_METRICS = 16
LONGEST_NAME = 400
AXES = ("step", "time")


class BadQuery(Exception):
    """What was asked for makes no sense; the message says what would."""


@dataclass(frozen=True)
class Query:
    """The settings of one request."""

    given: Mapping[str, str]

    def only(self, *names: str) -> None:
        """Refuse any other setting, so that a misspelled one is not passed over."""
        for name in self.given:
            if name not in names:
                known = f"known are {', '.join(names)}" if names else "none is known here"
                raise BadQuery(
                    f"there is no setting {name!r:.60}; {known}{did_you_mean(name, names)}"
                )

    def text(self, name: str) -> str | None:
        """Return a name that was given, or None."""
        value = self.given.get(name)
        if value is not None and not 0 < len(value) <= LONGEST_NAME:
            raise BadQuery(f"{name} has {len(value)} characters; write 1 to {LONGEST_NAME}")
        return value

    def needed(self, name: str) -> str:
        """Return a name that must be given."""
        value = self.text(name)
        if value is None:
            raise BadQuery(f"{name} is missing; add {name}=…")
        return value

    def metrics(self) -> tuple[str, ...]:
        """Return the metrics asked for."""
        names = tuple(self.needed("metrics").split(","))
        if len(names) > MOST_METRICS:
            raise BadQuery(f"{len(names)} metrics at once; ask for {MOST_METRICS} at most")
        return names

    def window(self) -> Window:
        """Return which part of series is asked for, and how many points of it."""
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

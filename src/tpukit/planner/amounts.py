"""Parse and format durations, token counts and dollars: "30d", "15e12", "1.5T", "$50k"."""

import math
import re
from datetime import timedelta

from ..errors import ConfigError
from ..runtime.ranges import Range

_MINUTE, _HOUR, _WEEK = 1 / 1440, 1 / 24, 7.0
_DAYS = {
    **dict.fromkeys(("m", "min"), _MINUTE),
    **dict.fromkeys(("h", "hour", "hours"), _HOUR),
    **dict.fromkeys(("", "d", "day", "days"), 1.0),
    **dict.fromkeys(("w", "week", "weeks"), _WEEK),
}
# Upper bounds: a thousand times the largest run so far, a century, more than all chips cost.
MOST_TOKENS, LONGEST_DAYS, MOST_DOLLARS = 1e17, 36_500.0, 1e13
_COUNTS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
_NUMBER = re.compile(r"(\d+(?:[_,]\d{3})*(?:\.\d*)?(?:e[+-]?\d{1,3})?|\.\d+)\s*([a-z]*)", re.I)


def parse_days(value: object) -> float:
    """Return days from "30d", "12h", "2 weeks", a `timedelta`, or a number of days."""
    if isinstance(value, timedelta):
        value = value.total_seconds() / 86_400
    days = _read(value, _DAYS, "a duration", "30d, 12h or 2w")
    return Range(_MINUTE, LONGEST_DAYS).check("a duration", days, unit="days")


def days_text(days: float) -> str:
    """Return days as text, such as "12.5 days", "7.3 h", "7.7 s", or "no end" if infinite."""
    if math.isinf(days):
        return "no end"
    if days < _MINUTE:
        return f"{days * 86_400:.3g} s"
    if days < _HOUR:
        return f"{days / _MINUTE:.3g} min"
    if days < 1:
        return f"{days / _HOUR:.3g} h"
    if days >= 1000:
        return f"{days:,.0f} days"
    return "1 day" if days == 1 else f"{days:,.3g} days"


def count_text(count: float) -> str:
    """Return a count as text, such as "15T", "1.5B" or "800"."""
    for letter, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if count >= size:
            return f"{count / size:.4g}{letter}"
    return f"{count:.4g}"


def parse_tokens(value: object) -> float:
    """Return a number of tokens from 15e12, "15T" or "300B"."""
    tokens = _read(value, _COUNTS, "a number of tokens", "15e12, 15T or 300B")
    return Range(1, MOST_TOKENS).check("a number of tokens", tokens)


def parse_usd(value: object) -> float:
    """Return dollars from 50000, "$50,000" or "50k"."""
    shown = value.strip().removeprefix("$") if isinstance(value, str) else value
    dollars = _read(shown, _COUNTS, "an amount of dollars", "50000, $50,000 or 50k")
    return Range(0.01, MOST_DOLLARS).check("an amount of dollars", dollars)


def _read(value: object, units: dict[str, float], what: str, examples: str) -> float:
    refused = ConfigError(f"{value!r} is not {what}; write {examples}.")
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise refused
    if not isinstance(value, str):
        number, factor = float(value), 1.0
    else:
        found = _NUMBER.fullmatch(value.strip())
        if found is None or found[2].lower() not in units:
            raise refused
        number = float(found[1].replace("_", "").replace(",", ""))
        factor = units[found[2].lower()]
    if not 0 < number * factor < float("inf"):
        raise refused
    return number * factor

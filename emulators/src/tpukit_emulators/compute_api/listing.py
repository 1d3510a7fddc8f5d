"""Lists: filters, pages and lists over all zones, as far as the client of pods asks for them.

https://cloud.google.com/compute/docs/reference/rest/v1/instances/list describes both forms of
filters; what is understood here is `field = "value"` with `AND`, `OR` and dots in names.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from .refusals import Json, invalid

LARGEST_PAGE = 500
_TERM = re.compile(r'\s*\(?\s*([\w.-]+)\s*(=|!=|:|eq|ne)\s*("[^"]*"|[^\s)]+)\s*\)?\s*')


def listed(kind: str, items: Sequence[Json], query: Mapping[str, str]) -> Json:
    """Return one page of those items that a query asks for."""
    chosen = [item for item in items if matches(item, query.get("filter", ""))]
    size = min(int(query.get("maxResults", LARGEST_PAGE)), LARGEST_PAGE)
    first = int(query.get("pageToken", "0"))
    body: Json = {"kind": f"compute#{kind}", "items": chosen[first : first + size]}
    if first + size < len(chosen):
        body["nextPageToken"] = str(first + size)
    return body


def aggregated(
    kind: str, key: str, items: Sequence[Json], zones: Sequence[str], query: Mapping[str, str]
) -> Json:
    """Return one page of the items of all zones, zone by zone; empty zones say so."""
    page = listed(kind, items, query)
    by_zone: Json = {}
    for zone in zones:
        here = [item for item in page["items"] if item["zone"].endswith(f"/{zone}")]
        nothing = {"code": "NO_RESULTS_ON_PAGE", "message": "There are no results for this scope."}
        by_zone[f"zones/{zone}"] = {key: here} if here else {"warning": nothing}
    return page | {"items": by_zone}


def matches(item: Json, text: str) -> bool:
    """Tell whether an item is among those that a filter wants."""
    return not text or any(
        all(_holds(item, term) for term in one.split(" AND ")) for one in text.split(" OR ")
    )


def asks_only_for(field: str, text: str) -> bool:
    """Tell whether a filter looks at nothing but one field and what is inside it."""
    terms = [term for one in text.split(" OR ") for term in one.split(" AND ")]
    found = [_TERM.fullmatch(term) for term in terms]
    return all(one is not None and one[1].startswith(f"{field}.") for one in found)


def _holds(item: Json, text: str) -> bool:
    found = _TERM.fullmatch(text)
    if found is None:
        raise invalid("filter", text, "Invalid list filter expression.")
    field, operator, wanted = found.groups()
    wanted = wanted.strip('"')
    value: Any = item
    for part in field.split("."):
        value = value.get(part) if isinstance(value, dict) else None
    if operator == ":":
        return value is not None and (wanted == "*" or wanted in str(value))
    same = re.fullmatch(wanted, str(value)) if operator in ("eq", "ne") else str(value) == wanted
    return bool(same) is (operator in ("=", "eq"))

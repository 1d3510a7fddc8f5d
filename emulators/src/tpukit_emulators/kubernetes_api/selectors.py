"""Label and field selectors, as a list or a watch states them."""

import re
from collections.abc import Callable
from typing import Any

from tpukit.pods.manifests.reading import at, texts

from .refusal import Refusal

Object = dict[str, Any]
_TERM = re.compile(
    r"(!?)([A-Za-z0-9_./-]+)(?:\s*(==|=|!=)\s*([A-Za-z0-9_.-]*)|\s+(in|notin)\s*\(([^)]*)\))?"
)


def label_selector(text: str) -> Callable[[Object], bool]:
    """Return a test for `a=b,c!=d,e in (f,g),h,!i`.

    Raises:
        Refusal: It cannot be read.
    """
    tests: list[Callable[[dict[str, str]], bool]] = []
    for term in re.split(r",(?![^()]*\))", text):
        if term.strip():
            tests.append(_label_test(term.strip()))
    return lambda one: all(test(texts(at(one, "metadata", "labels"))) for test in tests)


def field_selector(text: str) -> Callable[[Object], bool]:
    """Return a test for `metadata.name=x,status.phase!=Running`.

    Raises:
        Refusal: It cannot be read.
    """
    wanted: list[tuple[list[str], str, bool]] = []
    for term in filter(None, text.split(",")):
        found = re.fullmatch(r"([A-Za-z.]+)(==|=|!=)(.*)", term)
        if not found:
            raise Refusal(400, f"invalid field selector: {term!r}")
        wanted.append((found[1].split("."), found[3], found[2] != "!="))
    return lambda one: all(
        (_text(at(one, *path)) == value) is equal for path, value, equal in wanted
    )


def _label_test(term: str) -> Callable[[dict[str, str]], bool]:
    found = _TERM.fullmatch(term)
    if not found:
        raise Refusal(400, f"unable to parse requirement: {term!r}")
    negated, key, operator, value, group, members = found.groups()
    if group:
        allowed = {one.strip() for one in members.split(",")}
        return lambda labels: (labels.get(key) in allowed) is (group == "in")
    if operator:
        return lambda labels: (labels.get(key) == value) is (operator != "!=")
    return lambda labels: (key in labels) is not bool(negated)


def _text(value: object) -> str:
    return "" if value is None else "true" if value is True else str(value)

"""Say in one sentence how the arrays of a checkpoint differ from those that are wanted."""

from collections.abc import Mapping, Sequence

from .named_arrays import LeafShape

MOST_NAMED = 3


def difference(
    saved: Mapping[str, Sequence[LeafShape]], wanted: Mapping[str, Sequence[LeafShape]]
) -> str | None:
    """How what was saved differs from what is wanted, item by item; None when it does not.

    Only the items in `wanted` count: a checkpoint may hold more.
    """
    findings: list[str] = []
    for item, shapes in wanted.items():
        if item not in saved:
            return f"it holds no '{item}', only {', '.join(saved) or 'nothing'}"
        findings += _differences(item, saved[item], shapes)
    if not findings:
        return None
    shown = "; ".join(findings[:MOST_NAMED])
    left = len(findings) - MOST_NAMED
    return f"{shown}; and {left} more" if left > 0 else shown


def _differences(item: str, saved: Sequence[LeafShape], wanted: Sequence[LeafShape]) -> list[str]:
    there = {shape.name: shape for shape in saved}
    here = {shape.name: shape for shape in wanted}
    findings: list[str] = []
    for name in [*here, *(name for name in there if name not in here)]:
        path = item if name == item else f"{item}/{name}"
        if name not in there:
            findings.append(f"{path} {here[name].what} is not in it")
        elif name not in here:
            findings.append(f"{path} {there[name].what} is only in it")
        elif (there[name].shape, there[name].dtype) != (here[name].shape, here[name].dtype):
            findings.append(f"{path} is {there[name].what} in it and {here[name].what} here")
    return findings

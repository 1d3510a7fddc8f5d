"""Requirement lines of installed packages, read as far as pairing jax, jaxlib and libtpu needs."""

import re
from dataclasses import dataclass

_REQUIREMENT = re.compile(
    r"(?P<name>[A-Za-z0-9._-]+)(\[[^\]]*\])?\s*\(?(?P<specifier>([<>=!~][^;)]*)?)\)?\s*(;(?P<marker>.*))?"
)
_EXTRA = re.compile(r"""extra\s*==\s*['"](?P<extra>[^'"]+)['"]""")
_CLAUSE = re.compile(r"(?P<operator>===|==|!=|<=|>=|~=|<|>)\s*(?P<version>[^\s]+)")


@dataclass(frozen=True)
class Requirement:
    """One `Requires-Dist` line."""

    name: str
    specifier: str
    extra: str | None


def parse_requirement(line: str) -> Requirement | None:
    """Read a requirement line, or None where it has another form (a URL, for example)."""
    found = _REQUIREMENT.fullmatch(line.strip())
    if found is None:
        return None
    extra = _EXTRA.search(found["marker"] or "")
    return Requirement(
        found["name"].lower(), found["specifier"].strip(), extra["extra"] if extra else None
    )


def satisfies(version: str, specifier: str) -> bool | None:
    """Whether a release satisfies a specifier such as `<=0.10.2,>=0.10.1` or `==0.0.42.*`.

    None when either holds more than numbers (`0.11.0rc1`): then nothing is claimed.
    """
    release = _release(version)
    verdicts: list[bool] = []
    for text in filter(None, (clause.strip() for clause in specifier.split(","))):
        clause = _CLAUSE.fullmatch(text)
        wanted = _release(clause["version"].removesuffix(".*")) if clause else None
        if clause is None or wanted is None or release is None:
            return None
        verdicts.append(
            _compare(release, clause["operator"], wanted, clause["version"].endswith(".*"))
        )
    return all(verdicts)


def _compare(
    release: tuple[int, ...], operator: str, wanted: tuple[int, ...], prefix: bool
) -> bool:
    width = max(len(release), len(wanted))
    ours, theirs = _padded(release, width), _padded(wanted, width)
    same_prefix = ours[: len(wanted)] == wanted
    match operator:
        case "==" | "===":
            return same_prefix if prefix else ours == theirs
        case "!=":
            return not same_prefix if prefix else ours != theirs
        case "~=":
            return ours >= theirs and ours[: len(wanted) - 1] == wanted[:-1]
        case "<=":
            return ours <= theirs
        case ">=":
            return ours >= theirs
        case "<":
            return ours < theirs
        case _:
            return ours > theirs


def _padded(release: tuple[int, ...], width: int) -> tuple[int, ...]:
    return release + (0,) * (width - len(release))


def _release(version: str) -> tuple[int, ...] | None:
    parts = version.split(".")
    if not all(part.isascii() and part.isdigit() for part in parts):
        return None
    return tuple(int(part) for part in parts)

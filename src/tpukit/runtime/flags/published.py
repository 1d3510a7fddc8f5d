"""What is published about flags, as data: bundles, exclusions, conflicts and descriptions."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any, Literal, get_args

from ..ranges import Range

Group = Literal["fusion", "async_collective", "megacore", "latency_hiding"]
GROUPS: tuple[Group, ...] = get_args(Group)


@dataclass(frozen=True, slots=True)
class BundleFlag:
    """One flag of the bundles; `generations` is None for every generation."""

    name: str
    value: bool | int | str
    level: int
    group: Group
    generations: frozenset[str] | None
    reason: str
    source: str


@dataclass(frozen=True, slots=True)
class Exclusion:
    """A flag that is published somewhere and left out here, and why."""

    name: str
    generations: frozenset[str] | None
    reason: str
    source: str


@dataclass(frozen=True, slots=True)
class ExclusiveFlags:
    """Flags of which at most one may be on."""

    flags: tuple[str, ...]
    reason: str
    source: str


@dataclass(frozen=True, slots=True)
class Bundles:
    """Everything in `bundles.toml`."""

    flags: tuple[BundleFlag, ...]
    excluded: tuple[Exclusion, ...]
    exclusive: tuple[ExclusiveFlags, ...]


@cache
def load_bundles() -> Bundles:
    """The bundles that come with tpukit."""
    data = _read("bundles.toml")
    sources: Mapping[str, str] = data["sources"]
    return Bundles(
        flags=tuple(BundleFlag(**_fields(entry, sources)) for entry in data["flag"]),
        excluded=tuple(Exclusion(**_fields(entry, sources)) for entry in data["excluded"]),
        exclusive=tuple(
            ExclusiveFlags(tuple(entry["flags"]), entry["reason"], sources[entry["source"]])
            for entry in data["conflict"]
        ),
    )


def exclusive_flags() -> tuple[ExclusiveFlags, ...]:
    """Flags that do not go together."""
    return load_bundles().exclusive


@cache
def published_descriptions() -> Mapping[str, str]:
    """What flags do, by name, as far as the compiler's guide says."""
    return _read("descriptions.toml")["descriptions"]


@cache
def published_ranges() -> Mapping[str, Range]:
    """Which numbers flags take, by name, as far as anybody says."""
    return {name: Range(*ends) for name, ends in _read("descriptions.toml")["ranges"].items()}


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads(resources.files("tpukit.runtime.flags").joinpath("data", name).read_text())


def _fields(entry: Mapping[str, Any], sources: Mapping[str, str]) -> dict[str, Any]:
    generations = entry.get("generations")
    return {
        **entry,
        "generations": None if generations is None else frozenset(generations),
        "source": sources[entry["source"]],
    }

"""Sharding rules: regular expressions on parameter paths, of which the first match decides."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jax.sharding import PartitionSpec

from ...errors import ShardingError, did_you_mean
from ..mesh.manual_axes import divisors

# The spec of a rule: a PartitionSpec, or a sequence of axis names, None and tuples of names.
RuleSpec = PartitionSpec | Sequence[Any]
# Patterns on parameter paths; the first that matches decides.
Rules = Sequence[tuple[str, RuleSpec]] | Mapping[str, RuleSpec]
Entries = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Rule:
    """A pattern and the axes it gives to each dimension, from the first on."""

    pattern: str
    spec: PartitionSpec
    _compiled: re.Pattern[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "_compiled", re.compile(self.pattern))
        except re.error as error:
            raise ShardingError(
                f"Sharding rule {self.pattern!r} is not a regular expression ({error}); "
                "escape special characters with a backslash."
            ) from None

    def matches(self, path: str) -> bool:
        """Whether the pattern occurs anywhere in the path."""
        return self._compiled.search(path) is not None


def parse_rules(
    rules: Rules | None,
    sizes: Mapping[str, int],
) -> tuple[Rule, ...]:
    """Check rules against the axes of a mesh.

    Raises:
        ShardingError: A pattern is malformed, or a spec names an axis the mesh does not have.
    """
    pairs = list(rules.items() if isinstance(rules, Mapping) else rules or ())
    parsed: list[Rule] = []
    for pattern, written in pairs:
        if isinstance(written, str):
            written = (written,)
        spec = written if isinstance(written, PartitionSpec) else PartitionSpec(*written)
        check_axes(spec, sizes, what=f"Sharding rule {pattern!r}")
        parsed.append(Rule(pattern, spec))
    return tuple(parsed)


def first_match(rules: Sequence[Rule], path: str) -> Rule | None:
    """Return the first rule whose pattern occurs in the path."""
    return next((rule for rule in rules if rule.matches(path)), None)


def spec_entries(spec: PartitionSpec, rank: int) -> Entries:
    """Return a spec as one tuple of axis names per dimension."""
    entries = [
        () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
        for entry in spec
    ]
    return (*entries, *((),) * (rank - len(entries)))


def entries_spec(entries: Sequence[tuple[str, ...]]) -> PartitionSpec:
    """Return the shortest spec with these axes on each dimension."""
    last = max((index for index, entry in enumerate(entries) if entry), default=-1)
    return PartitionSpec(
        *(axes[0] if len(axes) == 1 else (axes or None) for axes in entries[: last + 1])
    )


def check_axes(spec: PartitionSpec, sizes: Mapping[str, int], *, what: str) -> None:
    """Check that a spec names only axes of the mesh, each once.

    Raises:
        ShardingError: It does not; the message names the mesh's axes.
    """
    seen: set[str] = set()
    for axis in (axis for entry in spec_entries(spec, len(spec)) for axis in entry):
        if axis not in sizes:
            raise ShardingError(
                f"{what} names the axis {axis!r}, which the mesh does not have; its axes are "
                f"{', '.join(sizes)}.{did_you_mean(axis, sizes)}"
            )
        if axis in seen:
            raise ShardingError(
                f"{what} uses the axis {axis!r} twice in {spec}; an axis can shard one dimension."
            )
        seen.add(axis)


def check_fits(
    path: str,
    shape: tuple[int, ...],
    dims: Sequence[str | None],
    entries: Entries,
    sizes: Mapping[str, int],
    *,
    hint: str = "",
) -> None:
    """Check that every dimension divides evenly over its axes.

    Raises:
        ShardingError: One does not; the message names the dimension, the axes and the divisors.
    """
    if len(entries) > len(shape):
        raise ShardingError(
            f"The spec for {path!r} has {len(entries)} entries, but its shape is {shape}; "
            "give at most one entry for each dimension."
        )
    for index, axes in enumerate(entries):
        ways = math.prod(sizes[axis] for axis in axes)
        if shape[index] % ways:
            name = dims[index] or f"dimension {index}"
            own = {axis: sizes[axis] for axis in axes}
            raise does_not_divide(path, name, shape[index], own, hint=hint)


def does_not_divide(
    path: str, name: str, units: int, axes: Mapping[str, int], *, hint: str = ""
) -> ShardingError:
    """Return the error for `units` of a dimension that do not divide over `axes`, with a fix."""
    ways = math.prod(axes.values())
    seen = " x ".join(f"{axis}={size}" for axis, size in axes.items())
    fitting = [number for number in divisors(units) if number <= max(ways, 16)]
    return ShardingError(
        f"{path}: {name}={units} does not divide over {seen}; sizes that would: "
        f"{', '.join(map(str, fitting))}. Change the mesh{hint}."
    )

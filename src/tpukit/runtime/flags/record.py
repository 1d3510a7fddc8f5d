"""What was done to the flags, what a search found and what a level sets, each as a table."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ...shown import Shown
from .flag import Flag
from .published import BundleFlag

NOT_PUBLISHED = "unknown"


@dataclass(frozen=True, slots=True)
class AppliedFlag:
    """One flag that was set: where it went and what it replaced."""

    name: str
    value: str
    variable: str
    default: str | None
    reason: str | None = None
    source: str | None = None


@dataclass(frozen=True, slots=True)
class SkippedFlag:
    """One flag that was left alone, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class FlagRecord(Shown):
    """What `set_xla_flags` or `enable_xla_optimizations` did.

    Attributes:
        applied: The flags that were set, in order.
        variables: The environment variables as they are now.
        takes_effect: False when jax has already started its backends: the flags are in the
            environment, but only a new process will read them.
        skipped: Flags of a bundle that do not apply here.
        notes: Anything else worth a look, a sentence each.
    """

    applied: tuple[AppliedFlag, ...]
    variables: Mapping[str, str]
    takes_effect: bool
    skipped: tuple[SkippedFlag, ...] = ()
    notes: tuple[str, ...] = field(default=())

    def to_dict(self) -> dict[str, Any]:
        """Every field as plain data."""
        return {
            "applied": [asdict(flag) for flag in self.applied],
            "variables": dict(self.variables),
            "takes_effect": self.takes_effect,
            "skipped": [asdict(flag) for flag in self.skipped],
            "notes": list(self.notes),
        }

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        table: list[Text] = [Text("Flags set", "italic")]
        for flag in self.applied:
            default = NOT_PUBLISHED if flag.default is None else flag.default
            table.append(_whole(f"--{flag.name}={flag.value}"))
            table.append(Text(f"    {default} by default, in {flag.variable}", "dim"))
        lines = [Text(f"left out: {flag.name}: {flag.reason}", "dim") for flag in self.skipped]
        notes = [Text(note, "yellow") for note in self.notes]
        return Group(*table, *lines, *notes)


@dataclass(frozen=True)
class FlagListing(Shown):
    """Flags found by a search."""

    flags: tuple[Flag, ...]
    known_to: str

    def to_dict(self) -> dict[str, Any]:
        """Every field as plain data."""
        return {"known_to": self.known_to, "flags": [flag.to_dict() for flag in self.flags]}

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.text import Text

        count = f"{len(self.flags)} flag{'' if len(self.flags) == 1 else 's'} of {self.known_to}"
        lines = [Text(count, "italic")]
        for flag in self.flags:
            default = NOT_PUBLISHED if flag.default is None else flag.default or '""'
            lines.append(_whole(flag.name))
            lines.append(Text(f"    {flag.type}, {default} by default, in {flag.variable}", "dim"))
        return Group(*lines)


@dataclass(frozen=True)
class BundleListing(Shown):
    """What a level sets on a generation, why, and what it leaves out."""

    level: int
    generation: str | None
    flags: tuple[BundleFlag, ...]
    skipped: tuple[SkippedFlag, ...]

    def to_dict(self) -> dict[str, Any]:
        """Every field as plain data."""
        return {
            "level": self.level,
            "generation": self.generation,
            "flags": [
                {"name": one.name, "value": one.value, "level": one.level, "group": one.group,
                 "reason": one.reason, "source": one.source}
                for one in self.flags
            ],
            "skipped": [asdict(one) for one in self.skipped],
        }  # fmt: skip

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.padding import Padding
        from rich.text import Text

        where = self.generation or "every generation"
        parts: list[Any] = [
            Text(f"Level {self.level} on {where}: {len(self.flags)} flags", "italic")
        ]
        for one in self.flags:
            value = str(one.value).lower() if isinstance(one.value, bool) else str(one.value)
            parts.append(_whole(f"--{one.name}={value}"))
            parts.append(Padding(Text(f"level {one.level}: {one.reason}", "dim"), (0, 0, 0, 4)))
        left_out = [Text(f"left out: {one.name}: {one.reason}", "dim") for one in self.skipped]
        return Group(*parts, *left_out)


def _whole(name: str) -> Any:
    """A flag on a line of its own, never broken: it is there to be copied."""
    from rich.text import Text

    return Text(name, no_wrap=True, overflow="ignore")

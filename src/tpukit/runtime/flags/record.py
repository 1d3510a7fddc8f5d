"""What was done to the flags, what a search found and what a level sets, each as a table."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

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
class FlagRecord:
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
        from rich.table import Table
        from rich.text import Text

        table = Table(
            "flag", "value", "default", "variable", title="Flags set", title_justify="left"
        )
        for flag in self.applied:
            default = NOT_PUBLISHED if flag.default is None else flag.default
            table.add_row(flag.name, flag.value, default, flag.variable)
        lines = [Text(f"left out: {flag.name}: {flag.reason}", "dim") for flag in self.skipped]
        notes = [Text(note, "yellow") for note in self.notes]
        return Group(table, *lines, *notes)


@dataclass(frozen=True)
class FlagListing:
    """Flags found by a search."""

    flags: tuple[Flag, ...]
    known_to: str

    def to_dict(self) -> dict[str, Any]:
        """Every field as plain data."""
        return {"known_to": self.known_to, "flags": [flag.to_dict() for flag in self.flags]}

    def __rich__(self) -> Any:
        from rich.table import Table

        count = f"{len(self.flags)} flag{'' if len(self.flags) == 1 else 's'} of {self.known_to}"
        table = Table(title=count, title_justify="left")
        for column in ("flag", "type", "default", "variable"):
            table.add_column(column, overflow="fold")
        for flag in self.flags:
            default = NOT_PUBLISHED if flag.default is None else flag.default or '""'
            table.add_row(flag.name, flag.type, default, flag.variable)
        return table


@dataclass(frozen=True)
class BundleListing:
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
        from rich.table import Table
        from rich.text import Text

        where = self.generation or "every generation"
        title = f"Level {self.level} on {where}: {len(self.flags)} flags"
        table = Table(title=title, title_justify="left")
        for column in ("flag", "value", "level", "why"):
            table.add_column(column, overflow="fold")
        for one in self.flags:
            value = str(one.value).lower() if isinstance(one.value, bool) else str(one.value)
            table.add_row(one.name, value, str(one.level), one.reason)
        left_out = [Text(f"left out: {one.name}: {one.reason}", "dim") for one in self.skipped]
        return Group(table, *left_out)

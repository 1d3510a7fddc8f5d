"""What was done to the flags, in a form that prints itself."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

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

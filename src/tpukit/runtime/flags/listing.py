"""Flags as tables: what a search found, and what a level sets on a generation."""

from dataclasses import asdict, dataclass
from typing import Any

from .flag import Flag
from .published import BundleFlag
from .record import NOT_PUBLISHED, SkippedFlag


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

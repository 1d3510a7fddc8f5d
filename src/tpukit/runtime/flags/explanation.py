"""Everything known about one flag, in one place, and nothing made up."""

from dataclasses import dataclass
from typing import Any

from ...shown import Shown
from .flag import Flag
from .published import BundleFlag, Exclusion, load_bundles, published_descriptions
from .registry import FlagRegistry

NO_DESCRIPTION = "no description published"


@dataclass(frozen=True)
class FlagExplanation(Shown):
    """A flag, what is published about it, and the bundles that use it."""

    flag: Flag
    known_to: str
    used_by: tuple[BundleFlag, ...]
    excluded: tuple[Exclusion, ...]

    @property
    def description(self) -> str:
        """What is published: by jaxlib, else by the guide, else with a bundle, else nothing."""
        if self.flag.description:
            return self.flag.description
        if self.flag.name in published_descriptions():
            return published_descriptions()[self.flag.name]
        return self.used_by[0].reason if self.used_by else NO_DESCRIPTION

    def to_dict(self) -> dict[str, Any]:
        """Every field as plain data."""
        return {
            **self.flag.to_dict(),
            "known_to": self.known_to,
            "description": self.description,
            "used_by": [
                {
                    "value": used.value,
                    "level": used.level,
                    "group": used.group,
                    "generations": _names(used.generations),
                    "reason": used.reason,
                    "source": used.source,
                }
                for used in self.used_by
            ],
            "excluded": [
                {
                    "generations": _names(left_out.generations),
                    "reason": left_out.reason,
                    "source": left_out.source,
                }
                for left_out in self.excluded
            ],
        }

    def __rich__(self) -> Any:
        from rich.table import Table

        flag = self.flag
        table = Table(title=flag.name, title_justify="left", show_header=False)
        table.add_column(style="bold")
        table.add_column(overflow="fold")
        table.add_row("takes", flag.expects)
        default = flag.default if flag.default is not None else f"unknown: {flag.default_reason}"
        table.add_row("default", default or '""')
        table.add_row("goes to", flag.variable)
        one_compile = "yes" if flag.compile_option else "no, only for the whole process"
        table.add_row("for one compile", one_compile)
        table.add_row("does", self.description)
        table.add_row("known to", self.known_to)
        for used in self.used_by:
            where = ", ".join(_names(used.generations) or ["every generation"])
            table.add_row(
                f"level {used.level}", f"{used.value} on {where} ({used.group}); {used.source}"
            )
        for left_out in self.excluded:
            where = ", ".join(_names(left_out.generations) or ["every generation"])
            table.add_row("left out", f"on {where}: {left_out.reason}")
        return table


def explain_flag(name: str, *, registry: FlagRegistry | None = None) -> FlagExplanation:
    """Explain a flag of the installed libtpu or jaxlib.

    Raises:
        FlagError: No such flag; the message holds the nearest names.
        MissingExtraError: It is a TPU flag and libtpu is not installed.
    """
    registry = FlagRegistry.installed() if registry is None else registry
    flag = registry.find(name)
    versions = {"libtpu": registry.libtpu_version, "xla": registry.jaxlib_version}
    packages = {"libtpu": "libtpu", "xla": "jaxlib"}
    bundles = load_bundles()
    return FlagExplanation(
        flag=flag,
        known_to=" and ".join(f"{packages[p]} {versions[p]}" for p in flag.parsers),
        used_by=tuple(used for used in bundles.flags if used.name == flag.name),
        excluded=tuple(out for out in bundles.excluded if out.name == flag.name),
    )


def _names(generations: frozenset[str] | None) -> list[str] | None:
    return None if generations is None else sorted(generations)

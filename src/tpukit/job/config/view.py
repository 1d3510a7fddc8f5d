"""A configuration as `tpukit config show` prints it: every field, its value and its origin."""

from dataclasses import dataclass
from typing import Any

from ..settings import Settings
from .sections import section_of


@dataclass(frozen=True)
class ConfigView:
    """All fields of a configuration, set or not, with origins and meanings."""

    config: Settings

    def to_dict(self) -> dict[str, Any]:
        """Each field with its value, origin and meaning."""
        fields = type(self.config).model_fields
        return {
            name: {
                "value": value,
                "origin": str(self.config.origin_of(name)),
                "meaning": fields[name].description,
            }
            for name, value in self.config.model_dump(mode="json").items()
        }

    def __rich__(self) -> Any:
        """A table by section; values that were set stand out from defaults."""
        from rich.markup import escape
        from rich.table import Table

        table = Table("setting", "value", "from", "meaning", box=None, pad_edge=False)
        section = ""
        for name, entry in self.to_dict().items():
            if section_of(name) != section:
                section = section_of(name)
                table.add_row(f"[bold]{section.lower()}[/]")
            value, origin = entry["value"], entry["origin"]
            shown = "—" if value is None else escape(str(value))
            table.add_row(
                f"  {name}",
                shown,
                escape(origin),
                f"[dim]{entry['meaning'] or ''}[/]",
                style="dim" if origin == "default" else "bold",
            )
        return table

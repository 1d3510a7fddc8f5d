"""Settings as `tpukit config show` prints them: values, origins, meanings."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..shown import Shown
from .hidden import shown_values
from .sections import SECTIONS, Limits, section_of

if TYPE_CHECKING:
    from .job import Job
    from .settings import Settings


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting with its value."""

    section: str
    name: str
    value: Any
    origin: str
    meaning: str

    def to_dict(self) -> dict[str, Any]:
        """Return value, origin and meaning as plain data."""
        return {"value": self.value, "origin": self.origin, "meaning": self.meaning}


@dataclass(frozen=True)
class SettingsView(Shown):
    """All settings, set or not, by dotted path."""

    settings: tuple[Setting, ...]

    @classmethod
    def of_settings(cls, settings: "Settings") -> "SettingsView":
        """View one group of settings."""
        flat = {name for section in SECTIONS for name in section.model_fields}
        values = shown_values(settings)
        return cls(
            tuple(
                Setting(
                    section=section_of(name) if name in flat else "",
                    name=name,
                    value=values[name],
                    origin=str(settings.origin_of(name)),
                    meaning=field.description or "",
                )
                for name, field in type(settings).model_fields.items()
            )
        )

    @classmethod
    def of_job(cls, job: "Job") -> "SettingsView":
        """View a whole job, section by section."""
        return cls(tuple(_settings_of(job)))

    def to_dict(self) -> dict[str, Any]:
        """Return each setting by its name."""
        return {one.name: one.to_dict() for one in self.settings}

    def __rich__(self) -> Any:
        """Show a table by section; values that were set stand out from defaults."""
        from rich.table import Table
        from rich.text import Text

        table = Table("setting", "value", "from", "meaning", box=None, pad_edge=False)
        section = ""
        for one in self.settings:
            if one.section != section:
                section = one.section
                table.add_row(Text(section, style="bold"))
            shown = "—" if one.value is None else str(one.value)
            name = one.name.removeprefix(f"{section}.")
            style = "dim" if one.origin == "default" else "bold"
            meaning = Text(one.meaning, style="dim")
            table.add_row(f"  {name}", shown, one.origin, meaning, style=style)
        return table


def _settings_of(job: "Job") -> Iterable[Setting]:
    from .job import NESTED

    stated = job.to_dict()
    fields = type(job).model_fields
    # The model first, and the limits, which pydantic puts before it, last.
    for name in sorted(fields, key=lambda one: one in Limits.model_fields):
        field = fields[name]
        if name in NESTED or field.exclude:
            continue
        value = stated.get(name, getattr(job, name))
        yield Setting(
            section="job",
            name=name,
            value=value,
            origin=str(job.origin_of(name)),
            meaning=field.description or "",
        )
    for section in NESTED:
        settings = getattr(job, section)
        values = shown_values(settings)
        for name, field in type(settings).model_fields.items():
            path = f"{section}.{name}"
            yield Setting(
                section=section,
                name=path,
                value=values[name],
                origin=str(job.origin_of(path)),
                meaning=field.description or "",
            )

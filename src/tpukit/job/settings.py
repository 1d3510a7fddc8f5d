"""`Settings`: validated values with their origins; errors for unknown keys; the settings table."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Self, cast, get_args

from pydantic import BaseModel, PrivateAttr, ValidationError

from ..errors import ConfigError, TPUError, TPUValidationError, did_you_mean
from ..plain_data import JsonMapping, JsonObject
from ..shown import Facts, Renderable, Shown
from .document import Document, Origin
from .hidden import HIDDEN, is_hidden, shown_values
from .model_source import is_own_model
from .sections import SECTIONS, Limits, Section, section_of
from .yaml_text import write_yaml

if TYPE_CHECKING:
    from .job import Job


class Settings(Section):
    """Settings that are validated on every change and keep the origin of each value."""

    _origins: dict[str, Origin] = PrivateAttr(default_factory=dict[str, Origin])

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise as_config_error(error, type(self), type(self).model_fields) from None
        self._origins = {name: Origin("argument") for name in values}

    @classmethod
    def from_document(cls, document: Document) -> Self:
        """Validate a document whose paths are the names of the fields."""
        for path, origin in document.origins.items():
            if path not in cls.model_fields:
                raise unknown_key(path, cls.model_fields, where=origin.place)
        refuse_unknown_inside(document, cls)
        try:
            settings = cls(**document.values)
        except TPUError as error:
            raise document.explain(error) from None
        settings._origins = dict(document.origins)
        return settings

    def __setattr__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            super().__setattr__(name, value)
        else:
            self.update(**{name: value})

    def update(self, **changes: Any) -> Self:
        """Assign several fields at once; if they are not valid together, none is changed."""
        current = {name: getattr(self, name) for name in self.model_fields_set}
        checked = type(self)(**{**current, **changes})
        # `__setattr__` would call `update` again; `checked` is validated already.
        object.__setattr__(self, "__dict__", dict(checked.__dict__))
        self.__pydantic_fields_set__.update(changes)
        self._origins.update({name: Origin("assigned") for name in changes})
        return self

    def origin_of(self, field: str) -> Origin:
        """Return the origin of the value of `field`."""
        return self._origins.get(field, Origin("default"))

    def diff(self, other: "Settings") -> dict[str, tuple[Any, Any]]:
        """Return the fields that differ, with both values."""
        return {
            name: (getattr(self, name), getattr(other, name))
            for name in type(self).model_fields
            if getattr(self, name) != getattr(other, name)
        }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and not self.diff(other)

    def to_dict(self) -> JsonObject:
        """Return every value that was set, as plain data; secret values are hidden."""
        return shown_values(self, exclude_unset=True)

    def to_yaml(self) -> str:
        """Return YAML of every value that was set."""
        return write_yaml(self.to_dict())

    def __rich__(self) -> Renderable:
        """Show every field with its value and origin."""
        return SettingsView.of_settings(self)


def as_config_error(
    error: ValidationError, kind: type[BaseModel], known: Iterable[str]
) -> TPUError:
    """Return pydantic's errors as one `ConfigError`; a tpukit error inside is returned as it is."""
    problems = error.errors(include_url=False)
    first_cause = problems[0].get("ctx", {}).get("error")
    if len(problems) == 1 and isinstance(first_cause, TPUError) and len(problems[0]["loc"]) < 2:
        return first_cause
    sentences: list[str] = []
    for problem in problems:
        name = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            siblings = sibling_paths(kind, name) if "." in name else ()
            return unknown_key(name, siblings or known, where="an argument")
        expected = problem["msg"].removeprefix("Value error, ").rstrip(".")
        choices = re.findall(r"'([^']*)'", expected) if problem["type"] == "literal_error" else []
        near = did_you_mean(str(problem["input"]), choices)
        full_stop = "" if expected.endswith("?") else "."
        given = HIDDEN if is_hidden(problem["loc"], kind) else repr(problem["input"])
        sentences.append(f"{name}={given} is not valid: {expected}{full_stop}{near}")
    return ConfigError(" ".join(sentences))


_Kind = type[BaseModel]


def unknown_key(path: str, known: Iterable[str], *, where: str) -> TPUValidationError:
    """Return the error for a key that does not exist, with the nearest one that does."""
    known = sorted(known)
    section, _, key = path.rpartition(".")
    siblings = [path for path in known if path.rpartition(".")[0] == section]
    elsewhere = [path for path in known if _last(path) == key]
    hint = f" Did you mean '{elsewhere[0]}'?" if elsewhere else ""
    hint = hint or did_you_mean(key, siblings, by=_last) or did_you_mean(key, known, by=_last)
    if not hint and section and siblings:
        hint = f" Keys of {section}: are {', '.join(map(_last, siblings))}."
    hint = hint or " `tpukit config show` lists every setting."
    return ConfigError(f"{where} sets {path!r}, but tpukit has no such setting.{hint}")


def _last(path: str) -> str:
    return path.rpartition(".")[2]


def sibling_paths(kind: _Kind, path: str) -> list[str]:
    """Return the paths of all keys in the same section as the last key of `path`.

    Example:
        >>> sibling_paths(Job, "train.lora.rnk")
        ['train.lora.rank', 'train.lora.alpha', 'train.lora.targets', 'train.lora.base']
    """
    section = path.rpartition(".")[0]
    inner: _Kind | None = kind
    for name in section.split(".") if section else ():
        if not name.isdigit():  # a number is a row of a list; rows share the type of the list
            inner = None if inner is None else _kind_of(inner, name)
    return [] if inner is None else [f"{section}.{name}" for name in inner.model_fields]


def fold_inner_keys(document: Document, kind: _Kind, known: Iterable[str]) -> None:
    """Move keys such as `train.lora.rank` into the value of `train.lora`.

    `--set` and Python give them by dotted path; a file nests them already.
    """
    settings = frozenset(known)
    for path in [path for path in document.values if path not in settings]:
        section, _, key = path.rpartition(".")
        if section not in settings or not sibling_paths(kind, path):
            continue
        value = document.values.get(section)
        value = value.model_dump(exclude_unset=True) if isinstance(value, BaseModel) else value
        inner = cast("JsonMapping", value) if isinstance(value, Mapping) else {}
        document.values[section] = {**inner, key: document.values.pop(path)}
        document.origins[section] = document.origins.pop(path)


def refuse_unknown_inside(document: Document, kind: _Kind) -> None:
    """Refuse unknown keys inside values such as `train.lora` or `model`.

    Raises:
        ConfigError: A key is unknown; the message has its line and the nearest known key.
    """
    for path, value in document.values.items():
        if path == "model":
            _refuse_unknown_changes(document, value)
            continue
        for inner in _paths_inside(path, value):
            known = sibling_paths(kind, inner)
            if known and inner not in known:
                raise unknown_key(inner, known, where=document.place_of(inner))


def _refuse_unknown_changes(document: Document, model: object) -> None:
    """Refuse a key of `model: {preset: tiny, …}` that is no field of `TransformerConfig`."""
    if not isinstance(model, Mapping) or is_own_model(str(cast("Any", model).get("preset", ""))):
        return
    from ..models.transformer.config import TransformerConfig

    known = ["model.preset", *(f"model.{field.name}" for field in fields(TransformerConfig))]
    for name in cast("Mapping[str, object]", model):
        if (path := f"model.{name}") not in known:
            raise unknown_key(path, known, where=document.place_of(path))


def _paths_inside(path: str, value: object) -> Iterable[str]:
    """Yield the path of every key below `path`; a row of a list has its number as a key."""
    if isinstance(value, Mapping):
        for name, below in cast("Mapping[str, object]", value).items():
            yield f"{path}.{name}"
            yield from _paths_inside(f"{path}.{name}", below)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for number, row in enumerate(cast("Sequence[object]", value)):
            yield from _paths_inside(f"{path}.{number}", row)


def _kind_of(kind: _Kind, name: str) -> _Kind | None:
    """Return the settings class of a field, also inside Optional or a list; None if it has none."""
    field = kind.model_fields.get(name)
    within: list[Any] = [] if field is None else [field.annotation]
    while within:
        annotation = within.pop()
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return annotation
        within += get_args(annotation)
    return None


@dataclass(frozen=True, kw_only=True)
class Setting(Facts):
    """One setting with its value."""

    section: str
    name: str
    value: Any
    origin: str
    meaning: str
    _facts = "value origin meaning"


@dataclass(frozen=True)
class SettingsView(Shown):
    """All settings, set or not, by dotted path."""

    settings: tuple[Setting, ...]

    @classmethod
    def of_settings(cls, settings: "Settings") -> "SettingsView":
        """Return the view of a `TPUConfig` or `TrainingSettings`."""
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
        """Return the view of a job."""
        return cls(tuple(_settings_of(job)))

    def to_dict(self) -> JsonObject:
        """Return each setting by its name."""
        return {setting.name: setting.to_dict() for setting in self.settings}

    def __rich__(self) -> Renderable:
        """Show a table by section; values that were set are bold."""
        from rich.table import Table
        from rich.text import Text

        table = Table("setting", "value", "from", "meaning", box=None, pad_edge=False)
        section = ""
        for setting in self.settings:
            if setting.section != section:
                section = setting.section
                table.add_row(Text(section, style="bold"))
            shown = "—" if setting.value is None else str(setting.value)
            name = setting.name.removeprefix(f"{section}.")
            style = "dim" if setting.origin == "default" else "bold"
            meaning = Text(setting.meaning, style="dim")
            table.add_row(f"  {name}", shown, setting.origin, meaning, style=style)
        return table


def _settings_of(job: "Job") -> Iterable[Setting]:
    from .job import NESTED

    stated = job.to_dict()
    fields = type(job).model_fields
    # pydantic lists inherited fields first; the limits go last instead.
    for name in sorted(fields, key=lambda name: name in Limits.model_fields):
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

"""What every group of settings can do: change as a whole, remember origins, compare, print."""

import re
from collections.abc import Iterable
from typing import Any, Self

from pydantic import BaseModel, PrivateAttr, ValidationError

from ..errors import ConfigError, TPUError, did_you_mean
from .document import Document, Origin
from .hidden import HIDDEN, is_hidden, shown_values
from .keys import paths_beside, refuse_unknown_inside, unknown_key
from .sections import Section
from .yaml_text import write_yaml


class Settings(Section):
    """Settings that are valid at all times and know where each value came from."""

    _origins: dict[str, Origin] = PrivateAttr(default_factory=dict[str, Origin])

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise as_config_error(error, type(self), type(self).model_fields) from None
        self._origins = {name: Origin("argument") for name in values}

    @classmethod
    def from_document(cls, document: Document) -> Self:
        """Check the values of a document whose paths are the fields' names."""
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
        """Assign several fields at once; either all are valid together or none is changed."""
        current = {name: getattr(self, name) for name in self.model_fields_set}
        checked = type(self)(**{**current, **changes})
        # Not through setattr, which would come back here; `checked` has been through every check.
        object.__setattr__(self, "__dict__", dict(checked.__dict__))
        self.__pydantic_fields_set__.update(changes)
        self._origins.update({name: Origin("assigned") for name in changes})
        return self

    def origin_of(self, field: str) -> Origin:
        """Return where the value of `field` came from."""
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

    def to_dict(self) -> dict[str, Any]:
        """Return every value that was set, as plain data; literal variables are hidden."""
        return shown_values(self, exclude_unset=True)

    def to_yaml(self) -> str:
        """Return YAML of every value that was set."""
        return write_yaml(self.to_dict())

    def __rich__(self) -> Any:
        """Show every field with its value and where it came from."""
        from .view import SettingsView

        return SettingsView.of_settings(self)


def as_config_error(
    error: ValidationError, kind: type[BaseModel], known: Iterable[str]
) -> TPUError:
    """Return one sentence per problem of settings; tpukit's own errors come through as they are."""
    problems = error.errors(include_url=False)
    first_cause = problems[0].get("ctx", {}).get("error")
    if len(problems) == 1 and isinstance(first_cause, TPUError) and len(problems[0]["loc"]) < 2:
        return first_cause
    sentences: list[str] = []
    for problem in problems:
        name = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            beside = paths_beside(kind, name) if "." in name else ()
            return unknown_key(name, beside or known, where="an argument")
        expected = problem["msg"].removeprefix("Value error, ").rstrip(".")
        choices = re.findall(r"'([^']*)'", expected) if problem["type"] == "literal_error" else []
        near = did_you_mean(str(problem["input"]), choices)
        full_stop = "" if expected.endswith("?") else "."
        given = HIDDEN if is_hidden(problem["loc"], kind) else repr(problem["input"])
        sentences.append(f"{name}={given} is not valid: {expected}{full_stop}{near}")
    return ConfigError(" ".join(sentences))

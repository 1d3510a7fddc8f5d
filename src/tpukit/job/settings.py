"""What every configuration object can do: load, update as a whole, remember origins, print."""

import os
from collections.abc import Iterable, Mapping
from typing import Any, Self

from pydantic import PrivateAttr, ValidationError

from ..errors import ConfigError, TPUError
from .config.sections import Section
from .sources import Origin, Sources, unknown_field


class Settings(Section):
    """Settings that are valid at all times and know where each value came from."""

    _origins: dict[str, Origin] = PrivateAttr(default_factory=dict[str, Origin])

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise _as_tpukit_error(error, type(self).model_fields) from None
        self._origins = {name: Origin("argument") for name in values}

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str] | None = None,
        *,
        preset: str | None = None,
        environment: Mapping[str, str] | None = None,
        **arguments: Any,
    ) -> Self:
        """Join preset, YAML file, environment and arguments; each wins over those before it."""
        sources = Sources(cls.model_fields)
        if preset is not None:
            sources.add_preset(preset)
        if path is not None:
            sources.add_yaml_file(path)
        sources.add_environment(os.environ if environment is None else environment)
        sources.add_arguments(arguments)
        return cls._from_sources(sources)

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> Self:
        """Read a YAML file, and nothing else."""
        sources = Sources(cls.model_fields)
        sources.add_yaml_file(path)
        return cls._from_sources(sources)

    @classmethod
    def from_yaml(cls, text: str) -> Self:
        """Read YAML text."""
        sources = Sources(cls.model_fields)
        sources.add_yaml(text, name="YAML text")
        return cls._from_sources(sources)

    @classmethod
    def preset(cls, name: str, **arguments: Any) -> Self:
        """The `training`, `inference` or `development` preset, with changes."""
        sources = Sources(cls.model_fields)
        sources.add_preset(name)
        sources.add_arguments(arguments)
        return cls._from_sources(sources)

    @classmethod
    def _from_sources(cls, sources: Sources) -> Self:
        try:
            config = cls(**sources.values)
        except TPUError as error:
            raise sources.with_origins(error) from None
        config._origins = dict(sources.origins)
        return config

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
        """Where the value of `field` came from."""
        return self._origins.get(field, Origin("default"))

    def diff(self, other: "Settings") -> dict[str, tuple[Any, Any]]:
        """The fields that differ, with both values."""
        return {
            name: (getattr(self, name), getattr(other, name))
            for name in type(self).model_fields
            if getattr(self, name) != getattr(other, name)
        }

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and not self.diff(other)

    def to_dict(self) -> dict[str, Any]:
        """Every value that was set, as plain data."""
        return self.model_dump(mode="json", exclude_unset=True)

    def to_yaml(self) -> str:
        """YAML that `from_yaml` reads back to an equal configuration."""
        import yaml

        values = self.to_dict()
        # These end a line in YAML 1.1, and only an escaped one comes back as it was.
        odd = any(end in str(values) for end in (r"\x85", r"\u2028", r"\u2029"))
        return yaml.safe_dump(values, sort_keys=False, allow_unicode=not odd)

    def __rich__(self) -> Any:
        """Every field by section, with its value and where it came from."""
        from .config.view import ConfigView

        return ConfigView(self)


def _as_tpukit_error(error: ValidationError, fields: Iterable[str]) -> TPUError:
    """One sentence per problem; tpukit's own errors raised by a check come through as they are."""
    problems = error.errors(include_url=False)
    first_cause = problems[0].get("ctx", {}).get("error")
    if len(problems) == 1 and isinstance(first_cause, TPUError) and not problems[0]["loc"]:
        return first_cause
    sentences: list[str] = []
    for problem in problems:
        name = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            return unknown_field(name, fields, where="the configuration")
        expected = problem["msg"].removeprefix("Value error, ").rstrip(".")
        sentences.append(f"{name}={problem['input']!r} is not valid: {expected}.")
    return ConfigError(" ".join(sentences))

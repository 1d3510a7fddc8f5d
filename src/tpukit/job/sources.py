"""Where values come from: presets, YAML, environment, arguments; each with its origin."""

import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml

from ..errors import ConfigError, TPUError, TPUValidationError, did_you_mean

PREFIX = "TPUKIT_"
# Variables other tools already use for the same thing.
WELL_KNOWN = {
    "TPU_PROJECT": "project",
    "TPU_ZONE": "zone",
    "TPU_NETWORK": "network",
    "GOOGLE_APPLICATION_CREDENTIALS": "credentials_file",
}
# TPUKIT_ variables that are not settings of a job; `tests/config` checks the list is complete.
NOT_SETTINGS = frozenset(
    PREFIX + name
    for name in (
        "CACHE_DIR",
        "CHILD_REPLY",
        "COORDINATOR",
        "HOST_ID",
        "LOG_LEVEL",
        "NUM_HOSTS",
        "TRACEBACK",
    )
)


@dataclass(frozen=True)
class Origin:
    """Where one value came from."""

    kind: str
    name: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}".strip()


@cache
def presets() -> dict[str, dict[str, Any]]:
    """The presets by name."""
    text = (files("tpukit.job.config") / "data" / "presets.toml").read_text()
    return tomllib.loads(text)


class Sources:
    """Collects values from several places; a later source wins over an earlier one."""

    def __init__(self, known_fields: Iterable[str]) -> None:
        self.known = frozenset(known_fields)
        self.values: dict[str, Any] = {}
        self.origins: dict[str, Origin] = {}

    def add_preset(self, name: str) -> None:
        """Add a preset's values."""
        if name not in presets():
            raise ConfigError(
                f"there is no preset {name!r}; choose one of {', '.join(sorted(presets()))}."
                + did_you_mean(name, presets())
            )
        self._add(presets()[name], lambda _: Origin("preset", name))

    def add_yaml_file(self, path: str | os.PathLike[str]) -> None:
        """Add the values of a YAML file."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigError(
                f"the configuration file {os.fspath(path)!r} cannot be read: {error.strerror}."
            ) from None
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{os.fspath(path)!r} is not UTF-8 text (byte {error.start}); save it as UTF-8."
            ) from None
        self.add_yaml(text, name=os.fspath(path))

    def add_yaml(self, text: str, *, name: str) -> None:
        """Add the values of YAML text; `name` is what errors call it."""
        try:
            node = yaml.compose(text, Loader=yaml.SafeLoader)
            content: Any = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            raise ConfigError(f"{name} is not valid YAML: {_one_line(error)}") from None
        if content is None:
            return
        if not isinstance(content, dict) or not isinstance(node, yaml.MappingNode):
            raise ConfigError(
                f"{name} holds a {type(content).__name__}, but a configuration is a list of "
                "'key: value' lines; put each setting on its own line."
            )
        lines: dict[str, int] = {}
        for key, _ in node.value:
            line = key.start_mark.line + 1
            if key.value in lines:
                raise ConfigError(
                    f"{name} sets {key.value!r} twice, in lines {lines[key.value]} and {line}; "
                    "keep one."
                )
            lines[key.value] = line
        settings = {str(key): value for key, value in content.items()}  # pyright: ignore
        self._refuse_unknown(settings, where=name, lines=lines)
        self._add(settings, lambda key: Origin("file", f"{name}:{lines.get(key, 1)}"))

    def add_environment(self, environment: Mapping[str, str]) -> None:
        """Add values from well-known variables and from `TPUKIT_<FIELD>`."""
        found: dict[str, str] = {}
        names: dict[str, str] = {}
        for variable, text in environment.items():
            field = WELL_KNOWN.get(variable)
            if field is None and variable.startswith(PREFIX) and variable not in NOT_SETTINGS:
                field = variable.removeprefix(PREFIX).lower()
            if field is None or (field in found and variable in WELL_KNOWN):
                continue  # TPUKIT_ZONE is more specific than TPU_ZONE
            found[field], names[field] = text, variable
        unknown = sorted(field for field in found if field not in self.known)
        if unknown:
            variables = [PREFIX + field.upper() for field in self.known]
            raise ConfigError(
                f"the environment sets {names[unknown[0]]}, which is no setting of tpukit; "
                f"unset it." + did_you_mean(names[unknown[0]], variables)
            )
        parsed = {field: _scalar(text) for field, text in found.items()}
        self._add(parsed, lambda field: Origin("environment", names[field]))

    def add_arguments(self, arguments: Mapping[str, Any]) -> None:
        """Add values given in code or on the command line."""
        self._refuse_unknown(arguments, where="the arguments")
        self._add(arguments, lambda _: Origin("argument"))

    def with_origins(self, error: TPUError) -> TPUError:
        """The same error, saying which file or variable the named field came from."""
        text = str(error)
        for field, origin in self.origins.items():
            if origin.name and re.search(rf"\b{field}\b", text):
                return type(error)(f"{text} ({field} comes from {origin}.)")
        return error

    def _add(self, values: Mapping[str, Any], origin_of: Any) -> None:
        for field, value in values.items():
            self.values[field] = value
            self.origins[field] = origin_of(field)

    def _refuse_unknown(
        self, settings: Iterable[str], *, where: str, lines: Mapping[str, int] | None = None
    ) -> None:
        for field in settings:
            if field not in self.known:
                place = f"{where}:{lines[field]}" if lines and field in lines else where
                raise unknown_field(field, self.known, where=place)


def unknown_field(field: str, known: Iterable[str], *, where: str) -> TPUValidationError:
    """The error for a setting that does not exist."""
    known = sorted(known)
    hint = did_you_mean(field, known) or " `tpukit config show` lists every setting."
    return ConfigError(f"{where} sets {field!r}, which is no setting of tpukit.{hint}")


def parse_assignments(assignments: Iterable[str]) -> dict[str, Any]:
    """Read "key=value" texts as the command line takes them."""
    parsed: dict[str, Any] = {}
    for assignment in assignments:
        field, equals, text = assignment.partition("=")
        if not equals or not field.strip():
            raise ConfigError(f"{assignment!r} sets nothing; write key=value.")
        parsed[field.strip()] = _scalar(text)
    return parsed


def _scalar(text: str) -> Any:
    """Read text as YAML reads a scalar, so that 8, true and 4x4 mean what they say."""
    try:
        value = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError):
        return text
    if value is None and text.strip() in ("null", "~"):
        return None
    return text if isinstance(value, dict) or value is None else value


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())

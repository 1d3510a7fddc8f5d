"""`Document`: the values of a job from files, environment and arguments, before validation.

Each value has a dotted path (`train.z_loss`) and an origin. A later source overrides an earlier
one.
"""

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import ConfigError, TPUError, did_you_mean
from ..plain_data import MOST_YAML_BYTES, JsonMapping, JsonObject, read_limited
from .yaml_text import read_scalar, read_yaml

PREFIX = "TPUKIT_"
# Variables of other tools that set the same thing.
WELL_KNOWN = {
    "TPU_PROJECT": "project",
    "TPU_ZONE": "zone",
    "TPU_NETWORK": "network",
    "GOOGLE_APPLICATION_CREDENTIALS": "credentials_file",
}
# TPUKIT_ variables that are not settings of a job; `tests/job` checks that the list is complete.
NOT_SETTINGS = frozenset(
    PREFIX + name
    for name in (
        "ATTEMPT",
        "BUNDLE",
        "CACHE_DIR",
        "CAPTURE",
        "CAPTURE_OFFLINE",
        "CAPTURE_PROCESS",
        "CHILD_PARENT",
        "CHILD_REPLY",
        "CHIPS",
        "COORDINATOR",
        "COORDINATOR_HOST",
        "DASHBOARD_TOKEN",
        "EMULATED_HOST",
        "HEARTBEAT_S",
        "HOSTS_PER_SLICE",
        "HOST_ID",
        "LOCAL_HOSTS",
        "LOG_LEVEL",
        "NUM_HOSTS",
        "PROGRESS",
        "PROVIDER",
        "SETUP",
        "SLICE_ID",
        "STATE_DIR",
        "TRACEBACK",
    )
)
KINDS = ("preset", "file", "environment", "argument")


@dataclass(frozen=True)
class Origin:
    """The source of a value: a preset, a line of a file, a variable or an argument."""

    kind: str
    name: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.name}".strip()

    @property
    def place(self) -> str:
        """The source as error messages name it: file and line, or the kind of source."""
        return self.name if self.kind == "file" else f"the {self.kind}"


@dataclass(frozen=True)
class Document:
    """Values by dotted path, each with its origin.

    Attributes:
        sections: Keys such as "train" whose mapping is split into one value per key; any other
            mapping is a single value.
        values: Each value by dotted path.
        origins: The origin of each value by dotted path.
        lines: File and line of each key of a file, including keys inside a single value.
    """

    sections: frozenset[str]
    values: JsonObject = field(default_factory=JsonObject)
    origins: dict[str, Origin] = field(default_factory=dict[str, Origin])
    lines: dict[str, str] = field(default_factory=dict[str, str])

    def add(self, values: JsonMapping, origin: Origin) -> None:
        """Add values, nested or by dotted path, that all have the same origin."""
        for path, value in self._flat(values):
            self.values[path], self.origins[path] = value, origin

    def add_file(self, path: str | os.PathLike[str]) -> None:
        """Add the values of a YAML file."""
        try:
            text = read_limited(path, MOST_YAML_BYTES).decode()
        except OSError as error:
            raise ConfigError(f"{os.fspath(path)} cannot be read: {error.strerror}.") from None
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"{os.fspath(path)!r} is not UTF-8 text (byte {error.start}); save it as UTF-8."
            ) from None
        except ValueError as error:
            raise ConfigError(f"{os.fspath(path)} is not a job file: {error}.") from None
        self.add_yaml(text, name=os.fspath(path))

    def add_yaml(self, text: str, *, name: str) -> None:
        """Add the values of YAML text; error messages call it `name`."""
        values, lines = read_yaml(text, name=name)
        self.lines.update((path, f"{name}:{line}") for path, line in lines.items())
        for path, value in self._flat(values):
            line = lines.get(path, 1)
            self.values[path], self.origins[path] = value, Origin("file", f"{name}:{line}")

    def add_environment(self, environment: Mapping[str, str], known: Iterable[str]) -> None:
        """Add the values of `TPUKIT_<FIELD>` variables and of the variables in `WELL_KNOWN`."""
        known = frozenset(known)
        texts: dict[str, str] = {}
        names: dict[str, str] = {}
        for variable, text in environment.items():
            setting = WELL_KNOWN.get(variable)
            if setting is None and variable.startswith(PREFIX) and variable not in NOT_SETTINGS:
                setting = variable.removeprefix(PREFIX).lower()
            if setting is None or (setting in texts and variable in WELL_KNOWN):
                continue  # TPUKIT_ZONE is more specific than TPU_ZONE
            texts[setting], names[setting] = text, variable
        for setting, text in texts.items():
            if setting not in known:
                variables = [PREFIX + name.upper() for name in known]
                raise ConfigError(
                    f"the environment sets {names[setting]}, but tpukit has no such setting; "
                    f"unset it." + did_you_mean(names[setting], variables)
                )
            self.values[setting] = read_scalar(text)
            self.origins[setting] = Origin("environment", names[setting])

    def take(self, known: Iterable[str]) -> "Document":
        """Remove the entries of these paths and return them."""
        taken = Document(self.sections)
        for path in [path for path in self.values if path in frozenset(known)]:
            taken.values[path] = self.values.pop(path)
            taken.origins[path] = self.origins.pop(path)
        return taken

    def settle(self, path: str, value: Any, origin: Origin) -> None:
        """Add a value that was given under another name, unless a later source set it too.

        Raises:
            ConfigError: Two sources of the same kind set different values.
        """
        if path in self.values:
            before = self.origins[path]
            if KINDS.index(before.kind) > KINDS.index(origin.kind):
                return
            if before.kind == origin.kind and self.values[path] != value:
                raise ConfigError(
                    f"{before.place} sets {path}: {self.values[path]}, but {origin.place} sets "
                    f"{value}; keep one of them."
                )
        self.values[path], self.origins[path] = value, origin

    def place_of(self, path: str) -> str:
        """Return file and line of a key inside a value, or else the origin of that value."""
        outer = path
        while outer not in self.origins:
            outer = outer.rpartition(".")[0]
        origin = self.origins[outer]
        return self.lines.get(path, origin.place) if origin.kind == "file" else origin.place

    def nested(self) -> JsonObject:
        """Return the values as nested dictionaries."""
        tree: JsonObject = {}
        for path, value in self.values.items():
            section, dot, key = path.rpartition(".")
            (tree.setdefault(section, {}) if dot else tree)[key] = value
        return tree

    def explain(self, error: TPUError) -> TPUError:
        """Return the error with the origin of the field that its message names."""
        text = str(error)
        # Prefer a path that the message contains in full over a short one that is also a word.
        by_length = sorted(self.origins.items(), key=lambda item: -len(item[0]) * (item[0] in text))
        for path, origin in by_length:
            named = re.search(rf"\b{re.escape(path.rpartition('.')[2])}\b", text)
            if origin.name and named and origin.name not in text:
                return type(error)(f"{text} ({path} comes from {origin}.)")
        return error

    def _flat(self, values: JsonMapping) -> Iterable[tuple[str, Any]]:
        for key, value in values.items():
            if key in self.sections and isinstance(value, Mapping):
                below: JsonMapping = value  # pyright: ignore[reportUnknownVariableType]  any YAML
                yield from ((f"{key}.{name}", inner) for name, inner in below.items())
            elif key in self.sections and value is None:
                continue  # a section with every line commented out
            elif key in self.sections:
                raise ConfigError(f"{key} is {value!r}, but it is a section; write keys below it.")
            else:
                yield key, value


def parse_assignments(assignments: Iterable[str]) -> JsonObject:
    """Parse the "key=value" texts of `--set`."""
    parsed: JsonObject = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name.strip():
            raise ConfigError(f"{assignment!r} sets no key; write key=value.")
        parsed[name.strip()] = read_scalar(text)
    return parsed

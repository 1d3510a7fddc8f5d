"""Job files and meshes as text: YAML to the fields of a plan, with a way out of every mistake."""

import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ..errors import ConfigError, MeshError, did_you_mean

# Parts of a job file that other rooms read; a plan carries them along unread.
SECTIONS = ("train", "launch")
_EXAMPLE = "model: llama3.1-8b"


def is_job_file(target: str) -> bool:
    """Whether a command's target names a YAML file."""
    return target.endswith((".yaml", ".yml"))


def read_job_file(path: Path) -> dict[str, Any]:
    """The content of a job file."""
    import yaml

    try:
        data = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}).") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {_what_and_where(error)}.") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} holds no job; write keys such as model, batch_size and slice.")
    return data  # pyright: ignore[reportUnknownVariableType]  keys are checked by fields_from


def _what_and_where(error: Exception) -> str:
    """What the parser minds, and the line it stands in."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:
        return str(error).splitlines()[0]
    return f"line {mark.line + 1}, column {mark.column + 1}, {problem}"


def fields_from(data: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The fields of a plan from a job's keys; an unknown key is refused with the nearest one."""
    keys = sorted({*known, *SECTIONS} - {"sections", "model_changes"})
    for key in data:
        if key not in keys:
            raise ConfigError(
                f"'{key}' is not a key of a job; keys are {', '.join(keys)}."
                + did_you_mean(str(key), keys)
            )
    values = {key: value for key, value in data.items() if key not in SECTIONS}
    values["sections"] = _sections(data)
    model = values.get("model")
    if isinstance(model, Mapping):
        changes: dict[str, Any] = dict(model)  # pyright: ignore[reportUnknownArgumentType]  checked by the model
        values["model"] = changes.pop("preset", None)
        values["model_changes"] = changes
    if not isinstance(values.get("model"), str):
        raise ConfigError(f"a job needs 'model', for example {_EXAMPLE}.")
    if values.get("slice") is not None and not isinstance(values["slice"], str):
        raise ConfigError(f"slice is {values['slice']!r}; write a name such as v6e-8.")
    if isinstance(values.get("mesh"), str):
        values["mesh"] = parse_mesh(values["mesh"])
    if not isinstance(values.get("mesh", {}), Mapping):
        raise ConfigError(f"mesh is {values['mesh']!r}; write sizes by axis, e.g. {{fsdp: 8}}.")
    if values.get("dcn_mesh") is not None:
        values["dcn_mesh"] = tuple(values["dcn_mesh"])
    return values


def parse_mesh(text: str) -> dict[str, int]:
    """Read "fsdp=8,tensor=4"."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        name, equals, size = part.strip().partition("=")
        if not equals or not name or not re.fullmatch(r"-1|[0-9]+", size):
            raise MeshError(f"mesh '{text}': '{part}' is not a size; write fsdp=8,tensor=4.")
        if name in sizes:
            raise MeshError(f"mesh '{text}' names '{name}' twice; give each axis one size.")
        sizes[name] = int(size)
    return sizes


def _sections(data: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for name in SECTIONS:
        section = data.get(name)
        if section is None:
            continue
        if not isinstance(section, Mapping):
            raise ConfigError(f"{name} is {section!r}; write its settings as keys below it.")
        found[name] = dict(section)  # pyright: ignore[reportUnknownArgumentType]  read by its room
    return found

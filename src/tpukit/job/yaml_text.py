"""YAML of job files: `on` is a key and not a boolean, and the line of each key is returned."""

from collections.abc import Mapping
from typing import Any

import yaml

from ..errors import ConfigError
from ..plain_data import JsonMapping, JsonObject, parse_yaml

_BOOLEAN = "tag:yaml.org,2002:bool"
_RESOLVERS: dict[str, list[tuple[str, Any]]] = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _BOOLEAN or first in "tTfF"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class _Dumper(yaml.SafeDumper):
    """Writes YAML in which only true and false are booleans, not yes, no, on and off."""

    yaml_implicit_resolvers = _RESOLVERS  # pyright: ignore[reportAssignmentType]  as in pyyaml


def read_yaml(text: str, *, name: str) -> tuple[JsonObject, dict[str, int]]:
    """Return the nested values of YAML text, and the line of each key by dotted path.

    Args:
        text: The YAML.
        name: The name of the text in error messages.

    Raises:
        ConfigError: The text is not YAML, not a mapping, or sets a key twice.
    """
    lines: dict[str, int] = {}

    def find_lines(node: yaml.Node) -> None:
        if isinstance(node, yaml.MappingNode):
            _find_lines(node, "", lines, name)

    try:
        documents = parse_yaml(text, resolvers=_RESOLVERS, on_node=find_lines)
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"{name} is not valid YAML: {error}.") from None
    if len(documents) > 1:
        raise ConfigError(
            f"{name} has {len(documents)} YAML documents; keep the first, before '---'."
        )
    content = documents[0] if documents else None
    if content is None:
        return {}, {}
    if not isinstance(content, dict):
        raise ConfigError(
            f"{name} is a {type(content).__name__}; expected 'key: value' lines, one per setting."
        )
    return _with_text_keys(content), lines  # pyright: ignore[reportUnknownArgumentType]  any YAML


def write_yaml(values: JsonMapping) -> str:
    """Return YAML that `read_yaml` reads back."""
    # These characters end a line in YAML 1.1, so they must be escaped.
    must_escape = any(end in str(values) for end in (r"\x85", r"\u2028", r"\u2029"))
    return yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=not must_escape)


def read_scalar(text: str) -> Any:
    """Parse one YAML value, such as 8, true, 4x4 or {fsdp: 8}; other text is returned as it is."""
    try:
        values = parse_yaml(text, resolvers=_RESOLVERS)
    except ValueError:
        return text
    if len(values) != 1 or values[0] is None:
        return None if text.strip() in ("null", "~") else text
    return values[0]


def _find_lines(node: yaml.MappingNode, prefix: str, lines: dict[str, int], name: str) -> None:
    for key, value in node.value:
        path = f"{prefix}{key.value}"
        line = key.start_mark.line + 1
        if path in lines:
            raise ConfigError(
                f"{name} sets {path!r} twice, in lines {lines[path]} and {line}; keep one."
            )
        lines[path] = line
        rows = {f"{path}.{n}.": row for n, row in enumerate(_rows(value))}
        for below, inner in {f"{path}.": value, **rows}.items():
            if isinstance(inner, yaml.MappingNode):
                _find_lines(inner, below, lines, name)


def _rows(node: yaml.Node) -> list[yaml.Node]:
    return node.value if isinstance(node, yaml.SequenceNode) else []


def _with_text_keys(content: Mapping[Any, Any]) -> JsonObject:
    return {
        str(key): _with_text_keys(value) if isinstance(value, dict) else value  # pyright: ignore[reportUnknownArgumentType]  any YAML
        for key, value in content.items()
    }

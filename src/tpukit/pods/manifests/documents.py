"""Kubernetes documents as YAML that every parser reads in the same way."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import yaml

from ...errors import ConfigError
from ...plain_data import MOST_YAML_BYTES, parse_yaml, read_limited

Document = dict[str, Any]
Fields = Mapping[str, Any]  # a document, or a part of one, that is only read

# Text that every YAML version reads as text; all other text is quoted. kubectl reads YAML 1.1,
# where y, no and 1e3 are not text.
_PLAIN = re.compile(r"[A-Za-z][A-Za-z0-9_./-]+")
_WORDS = frozenset({"true", "false", "null", "yes", "no", "on", "off"})


class _QuotingDumper(yaml.SafeDumper):
    """Quotes text that could be read as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = None if _PLAIN.fullmatch(value) and value.lower() not in _WORDS else '"'
    if "\n" in value and value.isascii() and value.replace("\n", "").isprintable():
        style = "|"
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_QuotingDumper.add_representer(str, _text)


def to_yaml(documents: Iterable[Document]) -> str:
    """Return documents as YAML for `kubectl apply -f`."""
    return yaml.dump_all(
        documents, Dumper=_QuotingDumper, sort_keys=False, allow_unicode=False, width=10_000
    )


def read_yaml(text: str, *, name: str) -> list[Document]:
    """Return the documents of a file, with lists of objects flattened.

    Raises:
        ConfigError: The text is not YAML, or has documents that are not objects.
    """
    try:
        contents = parse_yaml(text)
    except ValueError as error:
        raise ConfigError(f"{name} is not valid YAML: {error}.") from None
    documents: list[Document] = []
    for number, content in enumerate(contents, start=1):
        if content is None:
            continue
        if not isinstance(content, dict):
            raise ConfigError(
                f"{name}: document {number} is a {type(content).__name__}; every document of a "
                "manifest is an object with apiVersion, kind and metadata."
            )
        document = cast("Document", content)
        items: Any = document.get("items")
        if str(document.get("kind")).endswith("List") and isinstance(items, list):
            parts = cast("list[Any]", items)
            documents += [part for part in parts if isinstance(part, dict)]
        else:
            documents.append(document)
    return documents


def read_files(*paths: Path) -> list[Document]:
    """Return the documents of all files, and of the YAML and JSON files in folders.

    Raises:
        ConfigError: A file cannot be read, or is not a manifest.
    """
    documents: list[Document] = []
    for path in paths:
        files = (
            sorted(file for file in path.iterdir() if file.suffix in (".yaml", ".yml", ".json"))
            if path.is_dir()
            else [path]
        )
        for file in files:
            try:
                text = read_limited(file, MOST_YAML_BYTES).decode()
            except OSError as error:
                raise ConfigError(f"{file} cannot be read: {error.strerror}.") from None
            except ValueError as error:
                raise ConfigError(f"{file} cannot be read: {error}.") from None
            documents += read_yaml(text, name=str(file))
    return documents

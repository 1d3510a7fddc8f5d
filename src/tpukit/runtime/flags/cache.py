"""The registry on disk, one file for each pair of jaxlib and libtpu versions."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..cache_folder import cache_folder
from ..files import write_json
from ..versions import NOT_INSTALLED

FORMAT = 2  # raise it when what is read, or how it is written, changes


def registry_path(jaxlib_version: str, libtpu_version: str | None) -> Path:
    """The file that holds the registry of this pair."""
    name = f"jaxlib-{jaxlib_version}_libtpu-{libtpu_version or NOT_INSTALLED}_v{FORMAT}.json"
    return cache_folder("flags") / name


def load(path: Path) -> dict[str, Any] | None:
    """What the file holds, or None when it is missing or damaged: then it is read anew."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None  # pyright: ignore[reportUnknownVariableType]


def store(path: Path, data: Mapping[str, Any]) -> bool:
    """Write the file whole or not at all; False when the folder cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, dict(data))
    except OSError:
        return False
    return True

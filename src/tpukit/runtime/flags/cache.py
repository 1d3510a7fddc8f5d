"""The registry on disk, one file for each pair of jaxlib and libtpu versions."""

import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FORMAT = 1  # raise it when what is read, or how it is written, changes


def cache_folder() -> Path:
    """Where tpukit keeps what it can always make again.

    `TPUKIT_CACHE_DIR`, else `$XDG_CACHE_HOME/tpukit`, else `~/.cache/tpukit`.
    """
    if chosen := os.environ.get("TPUKIT_CACHE_DIR"):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "tpukit"


def registry_path(jaxlib_version: str, libtpu_version: str | None) -> Path:
    """The file that holds the registry of this pair."""
    name = f"jaxlib-{jaxlib_version}_libtpu-{libtpu_version or 'none'}_v{FORMAT}.json"
    return cache_folder() / "flags" / name


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
        handle, partial = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".partial")
        with os.fdopen(handle, "w") as file:
            json.dump(data, file)
        os.replace(partial, path)
    except OSError:
        return False
    return True

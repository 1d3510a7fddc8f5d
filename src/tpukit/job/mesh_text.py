"""Meshes as people write them: "fsdp=8,tensor=4", or sizes by axis."""

import re
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError, MeshError


def read_mesh(value: object) -> Mapping[str, int]:
    """Return sizes by axis from a text or a mapping.

    Raises:
        MeshError: A text is none.
        ConfigError: It is neither.
    """
    if isinstance(value, str):
        return parse_mesh(value)
    if not isinstance(value, Mapping) or not value:
        raise ConfigError(f"mesh is {value!r}; write sizes by axis, e.g. {{fsdp: 8}}.")
    sizes: Mapping[Any, Any] = value
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool):
            raise ConfigError(f"mesh axis {name} is {size!r}; write a whole number, or -1.")
    return {str(name): size for name, size in sizes.items()}


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


def write_mesh(sizes: Mapping[str, int]) -> str:
    """Write sizes as `parse_mesh` reads them."""
    return ",".join(f"{name}={size}" for name, size in sizes.items())

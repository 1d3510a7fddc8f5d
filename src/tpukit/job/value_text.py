"""Values as people write them in a job: meshes ("fsdp=8,tensor=4") and memory ("32GB")."""

import re
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError, MeshError

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_FORM = re.compile(r"\s*(\d{1,20}(?:\.\d{1,20})?|\.\d{1,20})\s*([a-z]*)\s*", re.IGNORECASE)
_LARGEST_BYTES = 2**63


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
        if not equals or not name or not re.fullmatch(r"-1|[0-9]{1,9}", size):
            raise MeshError(f"mesh '{text}': '{part}' is not a size; write fsdp=8,tensor=4.")
        if name in sizes:
            raise MeshError(f"mesh '{text}' names '{name}' twice; give each axis one size.")
        sizes[name] = int(size)
    return sizes


def write_mesh(sizes: Mapping[str, int]) -> str:
    """Write sizes as `parse_mesh` reads them."""
    return ",".join(f"{name}={size}" for name, size in sizes.items())


def parse_bytes(amount: object) -> int:
    """Return `amount` in bytes; GB is 10⁹ and GiB is 2³⁰.

    Raises:
        ConfigError: Not an amount of memory.
    """
    if isinstance(amount, bool) or not isinstance(amount, int | float | str):
        raise ConfigError(
            f"{amount!r} is not an amount of memory; write '32GB', '31.25GiB' or a number of bytes."
        )
    match = _FORM.fullmatch(amount if isinstance(amount, str) else f"{amount:f}")
    if match is None:
        raise ConfigError(
            f"{amount!r} is not an amount of memory; write '32GB', '31.25GiB' or a number of bytes."
        )
    number, unit = match.groups()
    factor = _UNITS.get(unit.lower())
    if factor is None:
        raise ConfigError(f"{amount!r} has no known unit; use one of B, KB, MB, GB, KiB, MiB, GiB.")
    # Whole numbers stay whole: a float would round those above 2⁵³.
    result = int(number) * factor if number.isdigit() else round(float(number) * factor)
    if not 0 < result < _LARGEST_BYTES:
        raise ConfigError(f"{amount!r} is no amount a chip can have; give the bytes of one chip.")
    return result


def format_bytes(amount: int) -> str:
    """Write `amount` so that `parse_bytes` gives it back exactly, as short as that allows."""
    for unit in ("TiB", "TB", "GiB", "GB", "MiB", "MB", "KiB", "KB"):
        factor = _UNITS[unit.lower()]
        if amount >= factor and amount % factor == 0:
            return f"{amount // factor}{unit}"
    return f"{amount}B"

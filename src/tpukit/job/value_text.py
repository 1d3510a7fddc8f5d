"""Values as people write them in a job: meshes ("fsdp=8,tensor=4") and memory ("32GB")."""

import re

from ..errors import ConfigError

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

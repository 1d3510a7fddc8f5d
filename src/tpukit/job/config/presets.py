"""Presets of `TPUConfig`: values for training, inference and development, as data."""

import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

from ...errors import ConfigError, did_you_mean


@cache
def presets() -> dict[str, dict[str, Any]]:
    """Return the presets by name."""
    text = (files("tpukit.job.config") / "data" / "presets.toml").read_text()
    return tomllib.loads(text)


def preset_values(name: str) -> dict[str, Any]:
    """Return the values of a preset.

    Raises:
        ConfigError: There is none of that name.
    """
    if name not in presets():
        raise ConfigError(
            f"there is no preset {name!r}; choose one of {', '.join(sorted(presets()))}."
            + did_you_mean(name, presets())
        )
    return presets()[name]

"""Presets of `TPUConfig`: values for training, inference and development, as data."""

import tomllib
from functools import cache
from importlib.resources import files

from ...errors import ConfigError, did_you_mean
from ...plain_data import JsonObject


@cache
def presets() -> dict[str, JsonObject]:
    """Return the presets by name."""
    text = (files("tpukit.job.config") / "data" / "presets.toml").read_text()
    return tomllib.loads(text)


def preset_values(name: str) -> JsonObject:
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

"""Transformers by name: `get_preset("llama3.1-8b")`."""

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from ..errors import TPUModelError, did_you_mean
from ..shown import Shown
from .transformer.config import TransformerConfig

_ABOUT_THE_ENTRY = ("source", "parameters", "parameters_source")


@dataclass(frozen=True, kw_only=True)
class Preset(Shown):
    """One named transformer and where its dimensions come from.

    `published_parameters` is None where nobody published an exact count.
    """

    config: TransformerConfig
    source: str
    published_parameters: int | None = None
    published_parameters_source: str | None = None

    @property
    def name(self) -> str:
        """The name `get_preset` knows it by."""
        return self.config.name

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "name": self.name,
            "config": self.config.to_dict(),
            "source": self.source,
            "published_parameters": self.published_parameters,
            "published_parameters_source": self.published_parameters_source,
        }


@cache
def presets() -> dict[str, Preset]:
    """Every preset, by name."""
    text = resources.files("tpukit.models").joinpath("presets.toml").read_text()
    return {name: _preset(name, entry) for name, entry in tomllib.loads(text).items()}


def _preset(name: str, entry: dict[str, Any]) -> Preset:
    fields = {key: value for key, value in entry.items() if key not in _ABOUT_THE_ENTRY}
    return Preset(
        config=TransformerConfig.from_dict({"name": name, **fields}),
        source=entry["source"],
        published_parameters=entry.get("parameters"),
        published_parameters_source=entry.get("parameters_source"),
    )


def list_presets() -> tuple[str, ...]:
    """The names `get_preset` knows."""
    return tuple(presets())


def get_preset(name: str, **changes: Any) -> TransformerConfig:
    """The configuration of the transformer called `name`, with `changes` applied.

    Example:
        >>> get_preset("tiny", n_layers=4).n_layers
        4
    """
    found = presets().get(name)
    if found is None:
        raise TPUModelError(
            f"no preset is called '{name}'; `list_presets()` or `tpukit presets` names them all."
            + did_you_mean(name, presets())
        )
    return found.config.replace(**changes) if changes else found.config

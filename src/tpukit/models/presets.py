"""Presets: transformers by name, as in `get_preset("llama3.1-8b")`, and their listing."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from ..errors import TPUModelError, did_you_mean
from ..plain_data import JsonObject
from ..shown import Shown
from .transformer.config import TransformerConfig

_ABOUT_THE_ENTRY = ("source", "parameters", "parameters_source")


@dataclass(frozen=True, kw_only=True)
class Preset(Shown):
    """One named transformer and the source of its dimensions.

    `published_parameters` is None where no exact count is published.
    """

    config: TransformerConfig
    source: str
    published_parameters: int | None = None
    published_parameters_source: str | None = None

    @property
    def name(self) -> str:
        """The name that `get_preset` accepts."""
        return self.config.name

    def to_dict(self) -> JsonObject:
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
    """Return every preset by name."""
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
    """Return the names that `get_preset` accepts."""
    return tuple(presets())


def get_preset(name: str, **changes: Any) -> TransformerConfig:
    """Return the configuration of the transformer called `name`, with `changes` applied.

    Example:
        >>> get_preset("tiny", n_layers=4).n_layers
        4
    """
    preset = presets().get(name)
    if preset is None:
        raise TPUModelError(
            f"there is no preset '{name}'; `list_presets()` or `tpukit presets` lists all."
            + did_you_mean(name, presets())
        )
    return preset.config.replace(**changes) if changes else preset.config


@dataclass(frozen=True)
class PresetListing(Shown):
    """A table of presets, one row each."""

    presets: Sequence[Preset]

    @classmethod
    def of(cls, part: str | None = None) -> "PresetListing":
        """Return all presets, or those with `part` in their names.

        Raises:
            TPUModelError: No name contains `part`; the message suggests the nearest.
        """
        known = presets()
        wanted = (part or "").strip().lower()
        matching = tuple(preset for name, preset in known.items() if wanted in name)
        if not matching:
            raise TPUModelError(
                f"no preset has {part!r} in its name; `tpukit presets` lists all."
                + did_you_mean(wanted, known)
            )
        return cls(matching)

    def to_dict(self) -> JsonObject:
        """Return every preset as plain data, with counted parameters."""
        return {
            "presets": [
                {**preset.to_dict(), "parameters": preset.config.parameter_count().to_dict()}
                for preset in self.presets
            ]
        }

    def __rich__(self) -> Any:
        from rich.table import Table

        heads = ("preset", "parameters", "per token", "layers", "width", "experts", "context")
        table = Table(*heads, "source", box=None, pad_edge=False)
        for preset in self.presets:
            config, count = preset.config, preset.config.parameter_count()
            experts = f"{config.experts_per_token} of {config.n_experts}"
            table.add_row(
                preset.name,
                f"{count.total / 1e9:,.3g} B",
                f"{count.active / 1e9:,.3g} B",
                str(config.n_layers),
                f"{config.d_model:,}",
                experts if config.n_experts else "",
                f"{config.max_seq_len:,}",
                preset.source,
            )
        table.caption = "Parameters are counted from the dimensions; --json has all of these."
        return table

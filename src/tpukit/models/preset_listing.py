"""The presets as a table: sizes and the source of each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import TPUModelError, did_you_mean
from ..shown import Shown
from .presets import Preset, presets


@dataclass(frozen=True)
class PresetListing(Shown):
    """Named transformers, one line each."""

    presets: Sequence[Preset]

    @classmethod
    def of(cls, part: str | None = None) -> "PresetListing":
        """Return all presets, or those whose names contain a text.

        Raises:
            TPUModelError: No name contains it; the message names the nearest.
        """
        known = presets()
        wanted = (part or "").strip().lower()
        found = tuple(one for name, one in known.items() if wanted in name)
        if not found:
            raise TPUModelError(
                f"no preset has {part!r} in its name; `tpukit presets` lists all."
                + did_you_mean(wanted, known)
            )
        return cls(found)

    def to_dict(self) -> dict[str, Any]:
        """Every preset by its name, with counted parameters."""
        return {
            "presets": [
                {**one.to_dict(), "parameters": one.config.parameter_count().to_dict()}
                for one in self.presets
            ]
        }

    def __rich__(self) -> Any:
        from rich.table import Table

        heads = ("preset", "parameters", "per token", "layers", "width", "experts", "context")
        table = Table(*heads, "source", box=None, pad_edge=False)
        for one in self.presets:
            config, count = one.config, one.config.parameter_count()
            experts = f"{config.experts_per_token} of {config.n_experts}"
            table.add_row(
                one.name,
                f"{count.total / 1e9:,.3g} B",
                f"{count.active / 1e9:,.3g} B",
                str(config.n_layers),
                f"{config.d_model:,}",
                experts if config.n_experts else "",
                f"{config.max_seq_len:,}",
                one.source,
            )
        table.caption = "Parameters are counted from the dimensions; --json has all of these."
        return table

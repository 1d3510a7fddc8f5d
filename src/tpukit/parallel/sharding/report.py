"""The decisions of a layout, parameter by parameter, and warnings."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from jax.sharding import PartitionSpec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ...plain_data import JsonObject
from ...shown import Shown
from .dimensions import Dims
from .rules import spec_entries


@dataclass(frozen=True)
class Placement:
    """The placement of one array.

    Attributes:
        path: Its path.
        shape: Its shape in the model.
        placed_shape: Its shape on the mesh; longer than `shape` only where it was padded.
        dims: The meaning of each dimension.
        spec: Which axes shard which dimension.
        itemsize: Bytes per element.
        bytes_per_device: Bytes on each device.
        decided_by: The rule or the strategies that shard it; "replicated" when none does.
    """

    path: str
    shape: tuple[int, ...]
    placed_shape: tuple[int, ...]
    dims: Dims
    spec: PartitionSpec
    itemsize: int
    bytes_per_device: int
    decided_by: str

    @property
    def bytes_total(self) -> int:
        """Size of the full array as placed."""
        return math.prod(self.placed_shape) * self.itemsize

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that shard it."""
        return tuple(axis for entry in spec_entries(self.spec, len(self.shape)) for axis in entry)

    def to_dict(self) -> JsonObject:
        """Return the placement as JSON data."""
        return {
            "path": self.path,
            "shape": list(self.shape),
            "placed_shape": list(self.placed_shape),
            "dims": list(self.dims),
            "spec": [list(entry) for entry in spec_entries(self.spec, len(self.shape))],
            "bytes_per_device": self.bytes_per_device,
            "decided_by": self.decided_by,
        }


@dataclass(frozen=True)
class LayoutReport(Shown):
    """All placements of a layout.

    Attributes:
        placements: One for each array.
        unused_rules: Patterns that matched no parameter.
        without_rule: Parameters no rule matched, when rules were given.
        big_replicated: Large parameters that every device has in full.
        idle_axes: Mesh axes, with sizes, that shard neither parameters nor activations, so that
            devices along them repeat the same work.
    """

    placements: tuple[Placement, ...]
    unused_rules: tuple[str, ...]
    without_rule: tuple[str, ...]
    big_replicated: tuple[str, ...]
    idle_axes: Mapping[str, int]

    @property
    def bytes_per_device(self) -> int:
        """Bytes of all arrays per device (exact, from the shapes)."""
        return sum(placement.bytes_per_device for placement in self.placements)

    @property
    def bytes_total(self) -> int:
        """Size of all arrays together."""
        return sum(placement.bytes_total for placement in self.placements)

    def warnings(self) -> tuple[str, ...]:
        """Return one sentence per finding that should be checked."""
        sentences: list[str] = []
        if self.unused_rules:
            sentences.append(f"Rules that matched no parameter: {_some(self.unused_rules)}.")
        if self.big_replicated:
            sentences.append(
                f"Large parameters that every device holds in full: {_some(self.big_replicated)}; "
                "give them a rule, or a dimension the mesh divides."
            )
        for axis, size in self.idle_axes.items():
            sentences.append(
                f"Mesh axis {axis}={size} splits nothing, so {size} devices repeat the same work; "
                "add a strategy that uses it (such as '+megatron' for a tensor axis)."
            )
        return tuple(sentences)

    def to_dict(self) -> JsonObject:
        """Return the report as JSON data."""
        return {
            "bytes_per_device": self.bytes_per_device,
            "bytes_total": self.bytes_total,
            "unused_rules": list(self.unused_rules),
            "without_rule": list(self.without_rule),
            "big_replicated": list(self.big_replicated),
            "idle_axes": dict(self.idle_axes),
            "placements": [placement.to_dict() for placement in self.placements],
        }

    def __rich__(self) -> RenderableType:
        """Return a table with one row per parameter, and the warnings under it."""
        table = Table(title=f"{self.bytes_per_device / 2**20:,.2f} MiB a device")
        table.add_column("parameter", overflow="fold")
        for name in ("shape", "spec", "MiB a device", "decided by"):
            table.add_column(name, justify="right" if "MiB" in name else "left")
        for placement in self.placements:
            table.add_row(
                placement.path,
                " x ".join(map(str, placement.placed_shape)) or "scalar",
                show_spec(placement.spec),
                f"{placement.bytes_per_device / 2**20:,.3f}",
                placement.decided_by,
            )
        return Group(table, *(Text(f"! {line}", style="yellow") for line in self.warnings()))


def show_spec(spec: PartitionSpec) -> str:
    """Format a spec: "data, -, model", or "replicated"."""
    entries = spec_entries(spec, len(spec))
    return ", ".join("+".join(entry) or "-" for entry in entries) or "replicated"


def _some(names: tuple[str, ...], most: int = 5) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more

"""What a memory manager knows at one moment, each figure with its origin."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ...hardware import Figure
from ...observe.sources.jax_memory import JaxSource
from ...shown import Shown

_COUNTED = "bytes of this manager's tensors that are alive"


@dataclass(frozen=True, kw_only=True)
class MemoryStats(Shown):
    """One reading, in bytes.

    Attributes:
        at: When it was taken.
        allocated_memory: Of tensors made by the manager that are alive, its pools included.
        peak_memory: The most that was allocated at once.
        pooled_memory: What of it belongs to pools.
        limit: What may be allocated, with where that number came from.
        device_memory: In use on the accelerator by jax, programs' buffers included; missing, with
            the reason, where there is none.
        tensors: Tensors that are alive.
        allocations: Tensors made so far; taking one from a pool makes none.
    """

    at: datetime
    allocated_memory: int
    peak_memory: int
    pooled_memory: int
    limit: Figure
    device_memory: Figure
    tensors: int
    allocations: int

    @property
    def limit_memory(self) -> int:
        """Bytes that may be allocated."""
        return int(self.limit.require("the memory that is left"))

    @property
    def available_memory(self) -> int:
        """Bytes that are left of the limit."""
        return max(0, self.limit_memory - self.allocated_memory)

    @property
    def utilization(self) -> float:
        """Share of the limit that is allocated."""
        return self.allocated_memory / self.limit_memory

    def figures(self) -> dict[str, Figure]:
        """Every quantity with its unit and origin."""
        counted = {
            name: Figure(getattr(self, name), "B", "measured", _COUNTED)
            for name in ("allocated_memory", "peak_memory", "pooled_memory")
        }
        available = Figure.derived(
            self.available_memory, "B", inputs=(self.limit, counted["allocated_memory"])
        )
        return {
            **counted,
            "limit": self.limit,
            "available_memory": available,
            "device_memory": self.device_memory,
        }

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        figures = {name: one.to_dict() for name, one in self.figures().items()}
        counts = {"tensors": self.tensors, "allocations": self.allocations}
        return {"at": self.at.isoformat(), **figures, **counts}

    def __rich__(self) -> Any:
        from rich.table import Table

        table = Table("memory", "", "origin", box=None, pad_edge=False)
        for name, figure in self.figures().items():
            shown = figure.origin or figure.reason
            table.add_row(
                name.replace("_", " "), figure.text, f"{shown}: {figure.source}".strip(": ")
            )
        return table


def device_memory() -> Figure:
    """Return what jax has in use on its first device, where it is known."""
    reading = JaxSource().read()
    used = reading.values("memory_used")
    if not used:
        return Figure.missing("B", f"{reading.missing['memory_used']}.")
    return Figure(used[0], "B", "measured", "jax's runtime, of its first device")

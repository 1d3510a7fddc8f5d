"""What a configuration answers: peak and measured performance, and how memory is spent."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class PerformanceMetrics(Mapping[str, float | None]):
    """Named figures, each with its origin, or None with the reason it is missing.

    Read it like a dictionary: `metrics["total_tflops"]`, `metrics.origins["total_tflops"]`,
    `metrics.reasons["utilization"]`.
    """

    values_by_name: Mapping[str, float | None]
    origins: Mapping[str, str] = field(default_factory=dict[str, str])
    reasons: Mapping[str, str] = field(default_factory=dict[str, str])

    class Builder:
        """Collects figures one by one."""

        def __init__(self) -> None:
            self._values: dict[str, float | None] = {}
            self._origins: dict[str, str] = {}
            self._reasons: dict[str, str] = {}

        def add(self, name: str, value: float | None, origin: str, reason: str) -> None:
            """Add a figure: its origin counts if there is a value, the reason if there is none."""
            self._values[name] = value
            if value is None:
                self._reasons[name] = reason
            else:
                self._origins[name] = origin

        def build(self) -> "PerformanceMetrics":
            """The figures, frozen."""
            return PerformanceMetrics(self._values, self._origins, self._reasons)

    def __getitem__(self, name: str) -> float | None:
        return self.values_by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_by_name)

    def __len__(self) -> int:
        return len(self.values_by_name)

    def to_dict(self) -> dict[str, Any]:
        """Each figure with its origin, or None with its reason."""
        return {
            name: {
                "value": value,
                "origin": self.origins.get(name),
                "reason": self.reasons.get(name),
            }
            for name, value in self.values_by_name.items()
        }

    def __rich__(self) -> Any:
        """A table: figure, value, where it came from or why it is missing."""
        from rich.table import Table

        table = Table("figure", "value", "origin", box=None)
        for name, value in self.values_by_name.items():
            shown = "—" if value is None else f"{value:,.4g}" if value < 1 else f"{value:,.1f}"
            table.add_row(name, shown, self.origins.get(name) or self.reasons.get(name, ""))
        return table


@dataclass(frozen=True)
class MemoryConfig(Mapping[str, Any]):
    """How a configuration spends memory; read it like a dictionary or by attribute."""

    use_mixed_precision: bool
    compute_dtype: str
    param_dtype: str
    memory_per_chip_bytes: int | None
    planned_bytes: int | None
    memory_fraction: float
    memory_optimization: str
    enable_rematerialization: bool
    gradient_checkpointing: bool

    def __getitem__(self, name: str) -> Any:
        if name not in self.__dataclass_fields__:
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.__dataclass_fields__)

    def __len__(self) -> int:
        return len(self.__dataclass_fields__)

    def to_dict(self) -> dict[str, Any]:
        """The fields as plain data."""
        return dict(self)

"""What one offline compile gave: memory as the compiler counts it, the program, the versions."""

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..hardware import Slice
from .hlo import HloModule, count_collectives, parse_hlo


@dataclass(frozen=True)
class MemoryUse:
    """Bytes per device as the compiler's own analysis states them."""

    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temp_bytes: int
    code_bytes: int

    @property
    def total_bytes(self) -> int:
        """Arguments, results that reuse no argument, temporaries and code."""
        fresh_output = self.output_bytes - self.alias_bytes
        return self.argument_bytes + fresh_output + self.temp_bytes + self.code_bytes


@dataclass(frozen=True)
class CompiledStep:
    """A program the real TPU compiler accepted for a slice."""

    name: str
    slice: Slice
    memory: MemoryUse
    flops: float | None
    compile_s: float
    hlo: str = field(repr=False)
    versions: dict[str, str]

    @cached_property
    def module(self) -> HloModule:
        """The scheduled program, read."""
        return parse_hlo(self.hlo)

    @property
    def collectives(self) -> dict[str, int]:
        """How many of each collective the program contains (a loop's body counts once)."""
        return count_collectives(self.module)

    @property
    def usable_bytes(self) -> int | None:
        """HBM of one device that the compiler lets a program use."""
        per_chip = self.slice.chip.hbm_usable_bytes.value
        return None if per_chip is None else int(per_chip // self.slice.chip.devices_per_chip)

    def to_dict(self) -> dict[str, Any]:
        """The figures as plain data, without the program text."""
        return {
            "name": self.name,
            "slice": str(self.slice),
            "fits": True,
            "memory": {
                "argument_bytes": self.memory.argument_bytes,
                "output_bytes": self.memory.output_bytes,
                "alias_bytes": self.memory.alias_bytes,
                "temp_bytes": self.memory.temp_bytes,
                "code_bytes": self.memory.code_bytes,
                "total_bytes": self.memory.total_bytes,
                "usable_bytes": self.usable_bytes,
                "origin": "compiler",
            },
            "flops_per_device": {"value": self.flops, "origin": "compiler"},
            "collectives": self.collectives,
            "compile_s": {"value": round(self.compile_s, 3), "origin": "measured"},
            "versions": self.versions,
        }

    def __rich__(self) -> Any:
        """A short report with the verdict first."""
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        usable = self.usable_bytes
        share = f" of {_amount(usable)} ({self.memory.total_bytes / usable:.1%})" if usable else ""
        verdict = Text.assemble(
            ("FITS ", "bold green"),
            f"{self.name} on {self.slice}: {_amount(self.memory.total_bytes)}{share} per device",
        )
        table = Table(box=None, show_header=False, pad_edge=False)
        for label, amount in (
            ("arguments", self.memory.argument_bytes),
            ("results", self.memory.output_bytes),
            ("  of which reuse arguments", self.memory.alias_bytes),
            ("temporaries", self.memory.temp_bytes),
            ("code", self.memory.code_bytes),
        ):
            table.add_row(label, _amount(amount), "compiler")
        if self.flops is not None:
            table.add_row("FLOPs per device", f"{self.flops:.4g}", "compiler")
        found = ", ".join(f"{count} {kind}" for kind, count in self.collectives.items())
        table.add_row("collectives", found or "none", "compiler")
        table.add_row("compile time", f"{self.compile_s:.1f} s", "measured")
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return Group(verdict, table, Text(versions, style="dim"))


def _amount(amount: int) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if amount >= factor:
            return f"{amount / factor:.2f} {unit}"
    return f"{amount} B"

"""The memory of one device as the compiler planned it: verdict, purposes, buffers, curve."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ...hardware import Slice
from ...hardware.figure import format_quantity
from ...shown import Shown

BYTES_ORIGIN = "compiler"
OFFLOADED_COMPUTATION = "offloaded computation"


@dataclass(frozen=True)
class Buffer:
    """One array in memory.

    Attributes:
        purpose: One of `attribution.CATEGORIES`; on the host also "offloaded", or "offloaded
            computation" for one that only the host computes in.
        shape: As the compiler writes it, e.g. "bf16[32,512,14336]".
        layout: Order and tiles of its dimensions.
        size_bytes: What it takes, with padding.
        padding_bytes: What of it layout in tiles leaves empty.
        space: "HBM" or "host".
        name: The argument's path, or where in the user's program it was computed.
        source: The line of source, or None.
        at_peak: Whether it is alive when HBM is fullest; False for an offloaded computation, whose
            buffers live while it runs.
    """

    purpose: str
    shape: str
    layout: str
    size_bytes: int
    padding_bytes: int
    space: str
    name: str
    source: str | None
    at_peak: bool


@dataclass(frozen=True)
class Peak:
    """The moment at which memory is fullest."""

    position: int
    instruction: str
    op_name: str
    source: str | None


@dataclass(frozen=True)
class ArgumentFinding:
    """Something about the arguments that costs memory for nothing.

    Attributes:
        kind: "not donated" or "replicated".
        size_bytes: What it costs on each device.
    """

    kind: str
    what: str
    size_bytes: int
    advice: str


@dataclass(frozen=True)
class MemoryReport(Shown):
    """Where the HBM of one device goes.

    Every figure is the compiler's own. The purposes add up to `total_bytes`.

    Attributes:
        fits: Whether the compiler accepted the program.
        total_bytes: What it plans to use of HBM: the figure its own test looks at.
        usable_bytes: What it may use.
        host_bytes: Host memory: pinned buffers and `host_computation_bytes`.
        host_computation_bytes: What computations that run on the host take there.
        purposes: Bytes by purpose, at the fullest moment.
        buffers: The largest arrays, largest first.
        peak: When it is fullest; None when the compiler listed no schedule.
        curve: (position in the schedule, bytes) with the maximum of each stretch kept.
        schedule_length: Positions in the schedule.
    """

    program: str
    slice: Slice
    fits: bool
    total_bytes: int
    usable_bytes: int | None
    host_bytes: int
    argument_bytes: int
    temp_bytes: int
    result_bytes: int
    alias_bytes: int
    purposes: Mapping[str, int]
    buffers: tuple[Buffer, ...] = field(repr=False)
    peak: Peak | None
    curve: tuple[tuple[int, int], ...] = field(repr=False)
    schedule_length: int
    findings: tuple[ArgumentFinding, ...]
    host_computation_bytes: int = 0

    @property
    def headroom_bytes(self) -> int | None:
        """What is left; negative when it does not fit."""
        return None if self.usable_bytes is None else self.usable_bytes - self.total_bytes

    @property
    def verdict(self) -> str:
        """One line: fits or not, and by how much."""
        need = format_quantity(self.total_bytes, "B")
        where = f"{self.program} on {self.slice}"
        if self.usable_bytes is None:
            return f"{where}: {need} of HBM per device"
        have = format_quantity(self.usable_bytes, "B")
        share = self.total_bytes / self.usable_bytes
        left = format_quantity(abs(self.usable_bytes - self.total_bytes), "B")
        rest = f"{left} free" if self.fits else f"{left} too much"
        return f"{where}: {need} of {have} HBM per device ({share:.1%}), {rest}"

    @property
    def refusal(self) -> str:
        """Why it does not fit and what takes the most, in two sentences."""
        need = f"{self.total_bytes / 2**30:.2f}G"
        have = "?" if self.usable_bytes is None else f"{self.usable_bytes / 2**30:.2f}G"
        largest = "; ".join(
            f"{one.shape} ({format_quantity(one.size_bytes, 'B')}, {one.purpose})"
            for one in [one for one in self.buffers if one.space == "HBM" and one.at_peak][:3]
        )
        return (
            f"{self.program} does not fit on {self.slice}: the compiler needs {need} of HBM per "
            f"device and has {have}. The largest buffers are {largest}; use a smaller batch, more "
            "rematerialization, more sharding or a larger slice."
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain data."""
        return {
            "program": self.program,
            "slice": str(self.slice),
            "fits": self.fits,
            "origin": BYTES_ORIGIN,
            "total_bytes": self.total_bytes,
            "usable_bytes": self.usable_bytes,
            "headroom_bytes": self.headroom_bytes,
            "host_bytes": self.host_bytes,
            "host_computation_bytes": self.host_computation_bytes,
            "argument_bytes": self.argument_bytes,
            "temp_bytes": self.temp_bytes,
            "result_bytes": self.result_bytes,
            "alias_bytes": self.alias_bytes,
            "purposes": dict(self.purposes),
            "buffers": [asdict(one) for one in self.buffers],
            "peak": None if self.peak is None else asdict(self.peak),
            "schedule_length": self.schedule_length,
            "curve": [list(point) for point in self.curve],
            "findings": [asdict(one) for one in self.findings],
        }

    def __rich__(self) -> Any:
        from .view import memory_view

        return memory_view(self)

"""The memory of devices around a profiled block: what jax reports, or why it reports nothing."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...runtime.files import write_json

FILE, ALLOCATIONS = "tpukit_memory.json", "memory.prof"
"""Beside the trace: the figures, and jax's list of live arrays for `pprof`."""


@dataclass(frozen=True)
class DeviceMemory:
    """The memory of one device at one moment.

    Attributes:
        in_use_bytes: Allocated; None with `reason`.
        peak_bytes: The most since the process started.
        limit_bytes: What programs may use.
    """

    device: str
    in_use_bytes: int | None = None
    peak_bytes: int | None = None
    limit_bytes: int | None = None
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return dict(vars(self))


def read_memory() -> list[DeviceMemory]:
    """Ask every local device for its memory."""
    import jax

    return [_read(device) for device in jax.local_devices()]


def _read(device: Any) -> DeviceMemory:
    name = f"{device.platform.upper()}:{device.local_hardware_id or device.id}"
    stats: Mapping[str, int] | None = device.memory_stats()
    if not stats:
        reason = f"jax reports no memory of {device.device_kind} devices"
        return DeviceMemory(name, reason=reason)
    return DeviceMemory(
        name,
        stats.get("bytes_in_use"),
        stats.get("peak_bytes_in_use"),
        stats.get("bytes_limit"),
    )


@dataclass(frozen=True)
class MemoryRecord:
    """The memory of all devices before and after a block."""

    before: tuple[DeviceMemory, ...]
    after: tuple[DeviceMemory, ...]

    def write(self, folder: Path) -> None:
        """Write it beside the trace, with the allocations that are live now."""
        import jax

        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / FILE, self.to_dict())
        jax.profiler.save_device_memory_profile(str(folder / ALLOCATIONS))

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "before": [one.to_dict() for one in self.before],
            "after": [one.to_dict() for one in self.after],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "MemoryRecord":
        """Read what `to_dict` gave."""
        known = ("device", "in_use_bytes", "peak_bytes", "limit_bytes", "reason")

        def devices(side: Sequence[Mapping[str, Any]]) -> tuple[DeviceMemory, ...]:
            return tuple(
                DeviceMemory(**{key: value for key, value in one.items() if key in known})
                for one in side
            )

        return cls(devices(data["before"]), devices(data["after"]))

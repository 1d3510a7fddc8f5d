"""`Profile`: a recording with its analysis, one step of it, and the memory around it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ...plain_data import JsonMapping, read_json
from ...runtime.files import write_json
from ...shown import Facts
from .analysis import BottleneckAnalysis, analysis_of
from .attribution import HostTimes, attribute
from .reading import find_recordings, read_recording
from .recording import Recording
from .steps import MeasuredStep, measured_step

FILE, ALLOCATIONS = "tpukit_memory.json", "memory.prof"
"""Files beside the trace: the memory figures, and jax's list of live arrays for `pprof`."""


@dataclass(frozen=True)
class DeviceMemory(Facts):
    """The memory of one device at one moment.

    Attributes:
        in_use_bytes: Allocated bytes; None with `reason`.
        peak_bytes: The most bytes since the process started.
        limit_bytes: Bytes that programs may use.
    """

    device: str
    in_use_bytes: int | None = None
    peak_bytes: int | None = None
    limit_bytes: int | None = None
    reason: str = ""


def read_memory() -> list[DeviceMemory]:
    """Return the memory of every local device."""
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
class MemoryRecord(Facts):
    """The memory of all devices before and after a block."""

    before: tuple[DeviceMemory, ...]
    after: tuple[DeviceMemory, ...]

    def write(self, folder: Path) -> None:
        """Write the record beside the trace, with the live allocations."""
        import jax

        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / FILE, self.to_dict())
        jax.profiler.save_device_memory_profile(str(folder / ALLOCATIONS))

    @classmethod
    def from_dict(cls, data: JsonMapping) -> "MemoryRecord":
        """Read what `to_dict` returned."""
        known = ("device", "in_use_bytes", "peak_bytes", "limit_bytes", "reason")

        def devices(side: Sequence[JsonMapping]) -> tuple[DeviceMemory, ...]:
            return tuple(
                DeviceMemory(**{key: value for key, value in device.items() if key in known})
                for device in side
            )

        return cls(devices(data["before"]), devices(data["after"]))


@dataclass(frozen=True)
class Profile:
    """One recording; analysis, step and memory are computed once, on first use."""

    recording: Recording

    @cached_property
    def times(self) -> list[HostTimes]:
        """Where the time of each device went."""
        return attribute(self.recording)

    @cached_property
    def analysis(self) -> BottleneckAnalysis:
        """What bounds the program."""
        return analysis_of(self.recording, self.times)

    @cached_property
    def step(self) -> MeasuredStep:
        """One step of the recording."""
        _ = self.analysis  # raises where no device ran an op
        return measured_step(self.recording, self.times)

    @cached_property
    def memory(self) -> MemoryRecord | None:
        """The memory around the block; None where it was not recorded."""
        try:
            data: Any = read_json(self.recording.folder / FILE)
            return MemoryRecord.from_dict(data)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None  # not recorded, or half written when the program ended


def read_profile(path: Path) -> Profile:
    """Read one recording: a folder with the files of its hosts, or a single file.

    Raises:
        TPUValidationError: A file cannot be read, or is cut short or damaged.
    """
    return Profile(read_recording(path))


def read_newest(path: Path) -> Profile:
    """Read the newest recording below a folder.

    Args:
        path: A file, the output folder of `TPUProfiler` or `jax.profiler`, or a run directory.

    Raises:
        TPUValidationError: There is none, or a file is cut short or damaged.
    """
    return read_profile(find_recordings(path)[-1])

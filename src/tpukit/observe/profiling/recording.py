"""The content of a profile: ops by device, host events, and the programs that ran."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .programs import ProfiledProgram

ID_BITS = 2**64 - 1
"""Mask for program numbers, which some events write as signed and others as unsigned."""

Interval = tuple[float, float]
"""Start and end in nanoseconds, on the common clock of a file."""

BARRIER = "tpukit_profile_barrier"
"""The program with which `TPUProfiler` waits for devices; its time is not counted."""


@dataclass(frozen=True, slots=True)
class OpEvent:
    """One run of one op on one device.

    Attributes:
        name: The HLO instruction; "" for a kernel or copy without one.
        kernel: The device's own name of the op, such as the CUDA kernel's.
        program: Name of the HLO module.
        program_id: The program's number in the file; None where the event has none.
        line: The stream or thread it was recorded on.
        is_async: Whether it runs beside the ops of the core, as an asynchronous copy or collective.
    """

    name: str
    kernel: str
    start: float
    end: float
    program: str = ""
    program_id: int | None = None
    line: str = ""
    is_async: bool = False

    @property
    def own_name(self) -> str:
        """The kernel's name; the instruction's name where the kernel has none of its own."""
        return self.name if not self.kernel or self.kernel.startswith("%") else self.kernel


@dataclass(frozen=True, slots=True)
class HostEvent:
    """An event on one of the host's threads."""

    name: str
    start: float
    end: float
    thread: str


@dataclass(frozen=True)
class HostActivity:
    """The events of one host by kind.

    Attributes:
        compiling: Tracing, lowering and compiling.
        launching: Handing programs to devices.
        transfers: Copies between the host and its devices.
        calls: Python functions, as "file.py:12 name".
    """

    compiling: Sequence[HostEvent] = ()
    launching: Sequence[HostEvent] = ()
    transfers: Sequence[HostEvent] = ()
    calls: Sequence[HostEvent] = ()


@dataclass(frozen=True)
class DeviceTrack:
    """The ops of one device.

    Attributes:
        name: "TPU:0", "GPU:0", "CPU:0".
        ops: In order of their start.
        runs: Intervals of complete program runs, where the file has them.
        properties: Properties of the device, such as its memory bandwidth.
    """

    name: str
    ops: Sequence[OpEvent]
    runs: Sequence[Interval] = ()
    properties: Mapping[str, float | str] = field(default_factory=dict[str, "float | str"])

    @property
    def platform(self) -> str:
        """The kind of device: TPU, GPU or CPU."""
        return self.name.partition(":")[0]


@dataclass(frozen=True)
class HostRecording:
    """One xplane file: a host with its devices.

    Attributes:
        window: The analyzed interval, on the file's clock.
        steps: Steps that the user annotated inside the window; 0 without annotations.
        programs: By number and by module name; the same object under both.
        annotations: Label and device kind that `TPUProfiler` wrote beside its block.
    """

    path: Path
    devices: tuple[DeviceTrack, ...]
    host: HostActivity
    window: Interval
    steps: int
    programs: Mapping[int | str, ProfiledProgram] = field(repr=False)
    annotations: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def duration_s(self) -> float:
        """Length of the window."""
        return (self.window[1] - self.window[0]) / 1e9

    def program_of(self, event: OpEvent) -> ProfiledProgram | None:
        """Return the program of an op, if the file contains it."""
        program = (
            None if event.program_id is None else self.programs.get(event.program_id & ID_BITS)
        )
        return program or self.programs.get(event.program)


@dataclass(frozen=True)
class Recording:
    """One profiled interval: the files of all hosts that recorded it.

    Attributes:
        label: Its given name, or its folder's.
    """

    label: str
    folder: Path
    hosts: tuple[HostRecording, ...]

    @property
    def device_kind(self) -> str:
        """The devices' kind in jax where `TPUProfiler` recorded it; else the platform."""
        kinds = {host.annotations.get("device_kind", "") for host in self.hosts} - {""}
        if kinds:
            return ", ".join(sorted(kinds))
        tracks = [device for host in self.hosts for device in host.devices]
        named = {str(track.properties.get("device_type_string", "")) for track in tracks} - {""}
        return ", ".join(sorted(named or {track.platform for track in tracks})) or "no device"

    @property
    def device_count(self) -> int:
        """Number of devices that ran an op."""
        return sum(len(host.devices) for host in self.hosts)

    @property
    def duration_s(self) -> float:
        """Length of the longest window."""
        return max((host.duration_s for host in self.hosts), default=0.0)

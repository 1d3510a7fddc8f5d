"""What a profile holds, whoever wrote it: ops by device, what the host did, which programs ran."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .programs import ProfiledProgram

ID_BITS = 2**64 - 1
"""Numbers of programs are fingerprints, which some events write with a sign and others without."""

Interval = tuple[float, float]
"""Start and end in nanoseconds, on the clock that all planes of one file share."""

BARRIER = "tpukit_profile_barrier"
"""The program with which `TPUProfiler` waits for devices; what it does is not counted."""


@dataclass(frozen=True, slots=True)
class OpEvent:
    """One run of one op on one device.

    Attributes:
        name: The HLO instruction; "" for a kernel or copy that belongs to none.
        kernel: What the device itself calls it, e.g. the name of a CUDA kernel.
        program: Name of the HLO module.
        program_id: Its number in the file; None where the event does not say.
        line: The row it was recorded on: a stream, a thread.
        is_async: Whether it runs beside the ops of the core (a copy or collective under way).
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
        """What to call it by itself: the kernel, but the instruction where that is its text."""
        return self.name if not self.kernel or self.kernel.startswith("%") else self.kernel


@dataclass(frozen=True, slots=True)
class HostEvent:
    """Something the host did, on one of its threads."""

    name: str
    start: float
    end: float
    thread: str


@dataclass(frozen=True)
class HostActivity:
    """What one host did while its devices ran.

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
    """What one device did.

    Attributes:
        name: "TPU:0", "GPU:0", "CPU:0".
        ops: In order of their start.
        runs: When whole programs ran, where the file says so.
        properties: What the device says of itself, e.g. its memory bandwidth.
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
        window: What counts, on the file's own clock.
        steps: Steps that the user's annotations mark inside the window; 0 without such.
        programs: By number and by name of the module; the same object under both.
        annotations: What `TPUProfiler` wrote beside its block: label, device kind.
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
        """The program an op belongs to, if the file holds it."""
        known = None if event.program_id is None else self.programs.get(event.program_id & ID_BITS)
        return known or self.programs.get(event.program)


@dataclass(frozen=True)
class Recording:
    """One profiled stretch of time: the files of all hosts that recorded it.

    Attributes:
        label: The name it was given, or that of its folder.
    """

    label: str
    folder: Path
    hosts: tuple[HostRecording, ...]

    @property
    def device_kind(self) -> str:
        """What ran it, as jax calls it where `TPUProfiler` recorded it; else the platform."""
        kinds = {host.annotations.get("device_kind", "") for host in self.hosts} - {""}
        if kinds:
            return ", ".join(sorted(kinds))
        tracks = [device for host in self.hosts for device in host.devices]
        named = {str(track.properties.get("device_type_string", "")) for track in tracks} - {""}
        return ", ".join(sorted(named or {track.platform for track in tracks})) or "no device"

    @property
    def device_count(self) -> int:
        """Devices that ran something."""
        return sum(len(host.devices) for host in self.hosts)

    @property
    def duration_s(self) -> float:
        """Length of the longest window."""
        return max((host.duration_s for host in self.hosts), default=0.0)

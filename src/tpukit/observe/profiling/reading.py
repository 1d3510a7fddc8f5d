"""Read xplane files: find them below a folder, and sort the events of hosts and devices."""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from ...errors import TPUValidationError
from ...records.hooks import PROFILE_MARK
from .hlo_proto import programs_in
from .programs import ProfiledProgram
from .recording import (
    BARRIER,
    ID_BITS,
    DeviceTrack,
    HostActivity,
    HostEvent,
    HostRecording,
    Interval,
    OpEvent,
    Recording,
)

# Names of host events of jax, PjRt and XLA.
_COMPILING = re.compile(
    r"backend_compile|trace_to_jaxpr|lower_\w*computation|XlaCompile|\w+Client::Compile|\w+Compiler::"
)
_LAUNCHING = re.compile(
    r"PjitFunction\(|.*Execut(e\b|eReplicated|able::)|.*Launch(Kernel|OnDevice)"
)
_TRANSFER = re.compile(
    r".*(DevicePut|device_put|Transfer(To|From)|BufferFromHost|CopyToDevice\b|ToLiteral"
    r"|CopyRawToHost|np\.asarray\(jax\.Array\)|TransferLiteral)"
)


_CALL, _OTHER = "$", "other"
_IGNORED = ("end: ", "Threadpool")


@lru_cache(maxsize=1 << 16)  # a trace has a million events and a thousand names
def _kind_of(name: str) -> str:
    """Return the field of `HostActivity` for an event, "other", or "" for one of no interest."""
    if name.startswith(_CALL):
        return "calls"
    if _COMPILING.match(name):
        return "compiling"
    if _TRANSFER.match(name):
        return "transfers"
    if _LAUNCHING.match(name):
        return "launching"
    return "" if name.startswith(_IGNORED) else _OTHER


@dataclass
class HostReader:
    """Sorts the events of the host's threads by kind.

    Attributes:
        wants_ops: Whether ops run on those threads too, as with the CPU backend.
        block: The block that `TPUProfiler` marked.
        steps: Steps that `jax.profiler.StepTraceAnnotation` marked.
    """

    wants_ops: bool
    block: Interval | None = None
    steps: list[Interval] = field(default_factory=list[Interval])
    annotations: dict[str, str] = field(default_factory=dict[str, str])
    _kinds: dict[str, list[HostEvent]] = field(default_factory=lambda: defaultdict(list[HostEvent]))
    _ops: dict[int, list[OpEvent]] = field(default_factory=lambda: defaultdict(list[OpEvent]))
    _runs: dict[tuple[int, int], Interval] = field(default_factory=dict[tuple[int, int], Interval])

    def read(self, lines: Iterable[Any]) -> None:
        """Add every event of every thread."""
        for line in lines:
            for event in line.events:
                kind = _kind_of(event.name)
                if kind == _OTHER:
                    self._other(event, line.name)
                elif kind:
                    self._add(kind, event, line.name)

    def _add(self, kind: str, event: Any, thread: str) -> None:
        name = event.name.removeprefix(_CALL)
        self._kinds[kind].append(HostEvent(name, event.start_ns, event.end_ns, thread))

    def _other(self, event: Any, thread: str) -> None:
        stats = {key: value for key, value in event.stats if key and not key.startswith("_")}
        span = event.start_ns, event.end_ns
        if event.name == PROFILE_MARK:
            # The longest block counts, in case the user's program has annotations of the same name.
            if self.block is None or span[1] - span[0] > self.block[1] - self.block[0]:
                self.block = span
                self.annotations = {key: str(value) for key, value in stats.items()}
        elif "step_num" in stats:
            self.steps.append(span)
        elif self.wants_ops and "hlo_op" in stats:
            ordinal = _whole(stats.get("device_ordinal"))
            self._ops[ordinal].append(
                OpEvent(
                    name=str(stats["hlo_op"]),
                    kernel=event.name,
                    start=span[0],
                    end=span[1],
                    program=str(stats.get("hlo_module", "")),
                    program_id=_whole(stats.get("program_id")),
                    line=thread,
                )
            )
            run = ordinal, _whole(stats.get("run_id"))
            known = self._runs.get(run, span)
            self._runs[run] = min(known[0], span[0]), max(known[1], span[1])

    def devices(self) -> list[DeviceTrack]:
        """Return the CPU devices that ran ops on these threads."""
        return [
            DeviceTrack(
                f"CPU:{ordinal}",
                sorted(ops, key=lambda op: (op.start, -op.end)),
                [span for (device, _), span in self._runs.items() if device == ordinal],
            )
            for ordinal, ops in self._ops.items()
        ]

    def activity(self) -> HostActivity:
        """Return the host's other events."""
        return HostActivity(**{kind: tuple(events) for kind, events in self._kinds.items()})


def _whole(value: object) -> int:
    return value if isinstance(value, int) else 0


ENDING = ".xplane.pb"
_DEVICE = re.compile(r"/device:(TPU|GPU):(\d+)(?!.*SparseCore)")
_HOST_PLANE = "/host:CPU"
# Lines of a TPU's plane.
OPS, ASYNC_OPS, MODULES = "XLA Ops", "Async XLA Ops", "XLA Modules"
# Lines that are derived from the GPU's streams, and would be counted twice.
_DERIVED = frozenset(
    (
        *("XLA Modules", "XLA Ops", "XLA TraceMe", "Steps", "TensorFlow Ops", "Framework Ops"),
        *("TensorFlow Name Scope", "Framework Name Scope", "Source code", "Source Code"),
    )
)
_PROGRAM = re.compile(r"(.*)\((\d+)\)")
_INSTRUCTION = re.compile(r"%?([\w.\-]+)(?: = |$)")
_EXPECTED = (
    "a folder that TPUProfiler or jax.profiler wrote, or the directory of a run that recorded some "
    "steps (tpukit train … --set 'train.hooks=[profile]')"
)


def find_recordings(path: Path) -> list[Path]:
    """Return the recording folders below `path`, oldest first.

    Args:
        path: A file, a recording folder, the output folder of `TPUProfiler` or `jax.profiler`, or a
            run directory.

    Raises:
        TPUValidationError: The path does not exist, or contains no profile.
    """
    try:
        if path.is_file():
            return [path]
        exists = path.is_dir()
        folders = {file.parent for file in path.rglob(f"*{ENDING}")}
        recordings = sorted(folders, key=lambda folder: (_modified(folder), str(folder)))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TPUValidationError(f"{path} cannot be read ({reason}).") from None
    if not exists:
        raise TPUValidationError(f"{path} does not exist; expected {_EXPECTED}.")
    if not recordings:
        raise TPUValidationError(
            f"{path} contains no profile (no file that ends in {ENDING}); expected {_EXPECTED}."
        )
    return recordings


def read_recording(path: Path) -> Recording:
    """Read one recording: a folder with the files of its hosts, or a single file.

    Raises:
        TPUValidationError: A file cannot be read, or is cut short or damaged.
    """
    files = [path] if path.is_file() else sorted(path.glob(f"*{ENDING}"))
    if not files:
        raise TPUValidationError(f"{path} contains no file that ends in {ENDING}.")
    hosts = tuple(read_file(file) for file in files)
    labels = {host.annotations.get("label", "") for host in hosts} - {""}
    folder = files[0].parent
    return Recording(", ".join(sorted(labels)) or _label_of(folder), folder, hosts)


def _label_of(folder: Path) -> str:
    """Return the name of a recording from its path in jax's layout: NAME/plugins/profile/TIME."""
    if folder.parent.parts[-2:] != ("plugins", "profile"):
        return folder.name
    given = folder.parents[2]
    # A run's traces are in a folder `profile`; the run's name is more helpful.
    return f"{(given.parent if given.name == 'profile' else given).name}/{folder.name}"


def read_file(path: Path) -> HostRecording:
    """Read one xplane file.

    Raises:
        TPUValidationError: It cannot be read, or is cut short or damaged.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise TPUValidationError(f"{path} cannot be read ({error.strerror}).") from None
    if not content:
        raise TPUValidationError(f"{path} is empty: the program ended before its trace did.")
    try:
        return _read(content, path)
    except (RuntimeError, ValueError, TypeError) as error:
        # RuntimeError by jax's reader, ValueError for names that are no Unicode.
        words = str(error).rstrip(".")
        raise TPUValidationError(
            f"{path} is no profile that can be read ({words}); record it again."
        ) from None


def _read(content: bytes, path: Path) -> HostRecording:
    from jax.profiler import ProfileData

    planes = list(ProfileData.from_serialized_xspace(content).planes)
    programs: dict[int | str, ProfiledProgram] = {}
    for named, module in programs_in(content):
        name, number = _split(named)
        program = ProfiledProgram(name, module)
        programs[name] = program
        if number is not None:
            programs[number & ID_BITS] = program
    devices = [_device(plane, found) for plane in planes if (found := _DEVICE.match(plane.name))]
    reader = HostReader(wants_ops=not any(device.ops for device in devices))
    for plane in planes:
        if plane.name == _HOST_PLANE:
            reader.read(plane.lines)
    recorded = [device for device in devices if device.ops] or reader.devices()
    devices = [kept for device in recorded if (kept := _without_barrier(device)).ops]
    window, steps = _window(reader, devices)
    return HostRecording(
        path=path,
        devices=tuple(sorted(devices, key=lambda device: int(device.name.partition(":")[2]))),
        host=reader.activity(),
        window=window,
        steps=steps,
        programs=programs,
        annotations={name: unquote(value) for name, value in reader.annotations.items()},
    )


def _without_barrier(device: DeviceTrack) -> DeviceTrack:
    return replace(device, ops=[op for op in device.ops if BARRIER not in op.program])


def _window(reader: HostReader, devices: Sequence[DeviceTrack]) -> tuple[Interval, int]:
    """Return the analyzed interval: the profiler's block, the annotated steps, or all ops."""
    ops = [(op.start, op.end) for device in devices for op in device.ops]
    for candidates in ([reader.block] if reader.block else [], reader.steps, ops):
        if candidates:
            window = min(start for start, _ in candidates), max(end for _, end in candidates)
            break
    else:
        window = 0.0, 0.0
    inside = [step for step in reader.steps if window[0] <= step[0] and step[1] <= window[1]]
    return window, len(inside)


def _device(plane: Any, found: re.Match[str]) -> DeviceTrack:
    name = f"{found[1]}:{found[2]}"
    properties = {
        key: value for key, value in plane.stats if key and isinstance(value, int | float | str)
    }
    lines = {line.name: line for line in plane.lines}
    if OPS in lines and found[1] == "TPU":
        modules = [(event.start_ns, event.end_ns, event.name) for event in _events(lines, MODULES)]
        modules.sort()
        ops = [_tpu_op(event, OPS, modules) for event in _events(lines, OPS)]
        ops += [_tpu_op(event, ASYNC_OPS, modules) for event in _events(lines, ASYNC_OPS)]
        runs = [(start, end) for start, end, _ in modules]
    else:
        kept = [line for line in plane.lines if line.name not in _DERIVED]
        ops = [_gpu_op(event, line.name) for line in kept for event in line.events]
        runs = []
    ops.sort(key=lambda op: (op.start, -op.end))
    return DeviceTrack(name, ops, runs, properties)


def _events(lines: Mapping[str, Any], name: str) -> Iterable[Any]:
    return lines[name].events if name in lines else ()


def _tpu_op(event: Any, line: str, modules: Sequence[tuple[float, float, str]]) -> OpEvent:
    match = _INSTRUCTION.match(event.name)
    at = bisect_right(modules, (event.start_ns, float("inf"), "")) - 1
    program, number = _split(modules[at][2]) if at >= 0 else ("", None)
    return OpEvent(
        name=match[1] if match else event.name,
        kernel=event.name,
        start=event.start_ns,
        end=event.end_ns,
        program=program,
        program_id=number,
        line=line,
        is_async=line == ASYNC_OPS,
    )


def _gpu_op(event: Any, line: str) -> OpEvent:
    stats = dict(event.stats)
    number = stats.get("program_id")
    return OpEvent(
        name=str(stats.get("hlo_op", "")),
        kernel=event.name,
        start=event.start_ns,
        end=event.end_ns,
        program=str(stats.get("hlo_module", "")),
        program_id=number if isinstance(number, int) else None,
        line=line,
    )


def _split(named: str) -> tuple[str, int | None]:
    """Return name and number of "jit_step(7)"."""
    match = _PROGRAM.fullmatch(named)
    return (match[1], int(match[2])) if match else (named, None)


def _modified(folder: Path) -> float:
    return max((file.stat().st_mtime for file in folder.glob(f"*{ENDING}")), default=0.0)

"""Reading xplane files: which there are below a folder, and what one holds."""

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from ...errors import TPUValidationError
from .host_events import HostReader
from .programs import ProfiledProgram
from .recording import BARRIER, ID_BITS, DeviceTrack, HostRecording, Interval, OpEvent, Recording
from .wire import programs_in

ENDING = ".xplane.pb"
_DEVICE = re.compile(r"/device:(TPU|GPU):(\d+)(?!.*SparseCore)")
_HOST_PLANE = "/host:CPU"
# Lines of a TPU's plane.
OPS, ASYNC_OPS, MODULES = "XLA Ops", "Async XLA Ops", "XLA Modules"
# Lines that viewers derive from the streams of a GPU, so that counting them too counts twice.
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
    """Return the folders below `path` that hold the files of one recording each, oldest first.

    Args:
        path: A file, such a folder, what `TPUProfiler` or `jax.profiler` was given, or a run
            directory.

    Raises:
        TPUValidationError: There is nothing there, or no profile in it.
    """
    try:
        if path.is_file():
            return [path]
        if not path.is_dir():
            raise TPUValidationError(f"{path} is not there; expected {_EXPECTED}.")
        folders = {file.parent for file in path.rglob(f"*{ENDING}")}
        found = sorted(folders, key=lambda folder: (_modified(folder), str(folder)))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TPUValidationError(f"{path} cannot be read ({reason}).") from None
    if not found:
        raise TPUValidationError(
            f"{path} holds no profile (no file that ends in {ENDING}); expected {_EXPECTED}."
        )
    return found


def read_recording(path: Path) -> Recording:
    """Read one recording: a folder with the files of its hosts, or a single file.

    Raises:
        TPUValidationError: A file cannot be read, or is cut short or damaged.
    """
    files = [path] if path.is_file() else sorted(path.glob(f"*{ENDING}"))
    if not files:
        raise TPUValidationError(f"{path} holds no file that ends in {ENDING}.")
    hosts = tuple(read_file(file) for file in files)
    labels = {host.annotations.get("label", "") for host in hosts} - {""}
    folder = files[0].parent
    return Recording(", ".join(sorted(labels)) or _label_of(folder), folder, hosts)


def _label_of(folder: Path) -> str:
    """The name of a recording by where jax put it: NAME/plugins/profile/TIME."""
    if folder.parent.parts[-2:] != ("plugins", "profile"):
        return folder.name
    given = folder.parents[2]
    # A run keeps its traces in a folder of their own, which says less than the run's name.
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
        # jax's reader raises the first, names that are no Unicode the second.
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
    """What counts: the block of `TPUProfiler`, else the annotated steps, else all ops."""
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
    found = _INSTRUCTION.match(event.name)
    at = bisect_right(modules, (event.start_ns, float("inf"), "")) - 1
    program, number = _split(modules[at][2]) if at >= 0 else ("", None)
    return OpEvent(
        name=found[1] if found else event.name,
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
    """Name and number of "jit_step(7)"."""
    found = _PROGRAM.fullmatch(named)
    return (found[1], int(found[2])) if found else (named, None)


def _modified(folder: Path) -> float:
    return max((file.stat().st_mtime for file in folder.glob(f"*{ENDING}")), default=0.0)

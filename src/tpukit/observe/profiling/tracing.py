"""Record one trace at a time; `profile_tpu_usage` reports from one how busy the devices are now."""

import inspect
import re
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import lru_cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import TPUValidationError
from ...hardware.missing import Measured, Missing
from ...plain_data import JsonObject
from ...records.hooks import PROFILE_MARK, profile_marks
from ...runtime.files import temporary_folder
from ...shown import Shown
from .profile import DeviceMemory, read_memory, read_profile
from .reading import find_recordings
from .recording import BARRIER

_ODD = re.compile(r"[^A-Za-z0-9._-]+")
_LONGEST_NAME = 60
_lock = threading.Lock()
_recorded_now: list[str] = []


@contextmanager
def only_one(name: str) -> Generator[None]:
    """Reserve the one profile that a process can record.

    Raises:
        TPUValidationError: Another profile is being recorded, in any thread.
    """
    with _lock:
        if _recorded_now:
            raise TPUValidationError(
                f"the profile '{name}' cannot begin: '{_recorded_now[0]}' is being recorded, and a "
                "process records one at a time; end that block first."
            )
        _recorded_now.append(name)
    try:
        yield
    finally:
        with _lock:
            _recorded_now.remove(name)


@contextmanager
def trace(folder: Path, name: str, *, python_calls: bool) -> Generator[None]:
    """Record devices and host during the block into `folder`, in jax's layout.

    The trace ends when all work dispatched in the block is done, or at once after an error.

    Raises:
        TPUValidationError: Another trace is being recorded, or this one cannot be written.
    """
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 1 if python_calls else 0
    if hasattr(options, "session_id"):
        # jax names sessions by the second, so that two in the same second would collide.
        options.session_id = f"{time.strftime('%Y_%m_%d_%H_%M_%S')}_{time.time_ns() % 10**9:09d}"
    wait_for_devices = _barrier(tuple(jax.local_devices()))
    marks = profile_marks(name, caller=_caller())
    try:
        jax.profiler.start_trace(str(folder), profiler_options=options)
    except RuntimeError as error:
        raise TPUValidationError(
            f"the profile '{name}' cannot begin ({error}); end the other trace of this process "
            "first (jax.profiler.stop_trace)."
        ) from None
    try:
        with jax.profiler.TraceAnnotation(PROFILE_MARK, **marks):
            yield
            wait_for_devices()
    finally:
        _stop(folder, name)


@lru_cache(maxsize=1)
def _barrier(devices: tuple[Any, ...]) -> Callable[[], None]:
    """Return a function that waits until the devices have finished all dispatched work.

    A discarded result cannot be waited for, but a device runs programs in order, so an empty
    program ends after all others. CPU devices keep that order only among programs of one device and
    among programs with collectives, so they run one of each kind. These programs are compiled
    before the trace begins, so that no compiling is recorded.
    """
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    def add_one(x: jax.Array) -> jax.Array:
        return x + 1

    def add_up(x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, "all")

    add_one.__name__ = add_up.__name__ = BARRIER
    alone = jax.jit(add_one)
    starts = [jax.device_put(0, device) for device in devices]
    last: list[Callable[[], jax.Array]] = [partial(alone, start) for start in starts]
    if devices[0].platform == "cpu" and len(devices) > 1:
        mesh, split = Mesh(devices, ("all",)), PartitionSpec("all")
        together = jax.jit(
            jax.shard_map(add_up, mesh=mesh, in_specs=split, out_specs=PartitionSpec())
        )
        whole = jax.device_put(np.zeros(len(devices)), NamedSharding(mesh, split))
        last.append(partial(together, whole))
    jax.block_until_ready([program() for program in last])

    def wait() -> None:
        for live_array in jax.live_arrays():
            try:
                live_array.block_until_ready()
            except RuntimeError:
                if not live_array.is_deleted():  # another thread may delete it meanwhile
                    raise
        jax.block_until_ready([program() for program in last])

    return wait


def _stop(folder: Path, name: str) -> None:
    import jax

    try:
        jax.profiler.stop_trace()
    except (RuntimeError, OSError) as error:
        raise TPUValidationError(
            f"the profile '{name}' could not be written to {folder} ({error}); choose a folder "
            "with room that can be written."
        ) from error


def folder_of(name: str) -> str:
    """Return a folder name: a name's plain characters, with a digest if others were replaced."""
    plain = _ODD.sub("_", name).strip("._")[:_LONGEST_NAME]
    if plain == name:
        return plain
    return f"{plain or 'profile'}-{sha256(name.encode(errors='replace')).hexdigest()[:8]}"


def _caller() -> str:
    """Return the line of the user's code that opened the block."""
    frame = inspect.currentframe()
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] not in ("tpukit", "contextlib"):
            file = Path(frame.f_code.co_filename).name
            return f"{file}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return ""


WATCHED_S = 1.0


@dataclass(frozen=True)
class DeviceUsage(Shown, Mapping[str, Any]):
    """The use of this process's devices. Reads like a mapping: `usage["memory_peak"]`.

    A figure that is not available is `Missing`: it formats as a dash and has a reason.

    Attributes:
        memory_allocated: Bytes, over all local devices.
        memory_peak: The most bytes since the process started, over all local devices.
        device_count: Devices of all hosts.
        device_utilization: Share of the watched time in which local devices were busy.
    """

    memory_allocated: Measured
    memory_peak: Measured
    device_count: int
    device_utilization: Measured

    def __getitem__(self, key: str) -> Any:
        if key not in self.__dataclass_fields__:
            raise KeyError(key)
        return getattr(self, key)

    def __iter__(self) -> Iterator[str]:
        return iter([field.name for field in fields(self)])

    def __len__(self) -> int:
        return len(fields(self))

    def to_dict(self) -> JsonObject:
        """Return plain data; a missing figure is None."""
        return {name: None if isinstance(value, Missing) else value for name, value in self.items()}


def profile_tpu_usage(
    during: Callable[[], object] | None = None, *, seconds: float = WATCHED_S
) -> DeviceUsage:
    """Measure the memory and utilization of this process's devices, of any kind.

    Args:
        during: A function to run and watch; by default the devices are watched for `seconds`, while
            other threads run.
        seconds: How long to watch without `during`.

    Raises:
        TPUValidationError: `seconds` is not above 0.
    """
    import jax

    if seconds <= 0:
        raise TPUValidationError(f"seconds={seconds:g} is not valid; give more than 0.")
    run = during if during is not None else lambda: time.sleep(seconds)
    utilization = _utilization(run)
    memory = read_memory()
    return DeviceUsage(
        memory_allocated=_total(memory, "in_use_bytes"),
        memory_peak=_total(memory, "peak_bytes"),
        device_count=jax.device_count(),
        device_utilization=utilization,
    )


def _utilization(run: Callable[[], object]) -> Measured:
    """Return the share of time in which devices were busy, by a temporary trace of `run`."""
    name = "profile_tpu_usage"
    with temporary_folder("tpukit-usage-") as folder:
        try:
            with only_one(name), trace(folder, name, python_calls=False):
                run()
            return _busy(folder)
        except TPUValidationError as error:
            return Missing(str(error))


def _busy(folder: Path) -> Measured:
    profile = read_profile(find_recordings(folder)[-1])
    devices = [device for host in profile.times for device in host.devices]
    window = profile.recording.duration_s
    if not devices or not window:
        return 0.0  # the trace contains no op
    import jax

    # Devices that ran nothing have no track, and still count.
    return sum(device.busy_s for device in devices) / (window * jax.local_device_count())


def _total(memory: list[DeviceMemory], field: str) -> Measured:
    values = [getattr(device, field) for device in memory]
    if any(value is None for value in values):
        reasons = {device.reason or "the device does not report it" for device in memory}
        return Missing("; ".join(sorted(reasons)))
    return sum(values)

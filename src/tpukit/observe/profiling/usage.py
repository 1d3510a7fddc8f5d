"""How much of the devices is used right now: memory, how many there are, how busy they are."""

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ...errors import TPUValidationError
from ...hardware.missing import Measured, Missing
from ...runtime.files import temporary_folder
from ...shown import Shown
from .memory import DeviceMemory, read_memory
from .profile import read_profile
from .reading import find_recordings
from .tracing import only_one, trace

WATCHED_S = 1.0


@dataclass(frozen=True)
class DeviceUsage(Shown, Mapping[str, Any]):
    """What the devices of this process use. Reads like a mapping: `usage["memory_peak"]`.

    A figure that cannot be had is `Missing`: it formats as a dash and carries its reason.

    Attributes:
        memory_allocated: Bytes, over all local devices.
        memory_peak: The most bytes since the process started, over all local devices.
        device_count: Devices of the whole run, all hosts together.
        device_utilization: Share of the watched time in which a local device did something.
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
        return iter([one.name for one in fields(self)])

    def __len__(self) -> int:
        return len(fields(self))

    def to_dict(self) -> dict[str, Any]:
        """Plain data; what is missing is None."""
        return {name: None if isinstance(value, Missing) else value for name, value in self.items()}


def profile_tpu_usage(
    during: Callable[[], object] | None = None, *, seconds: float = WATCHED_S
) -> DeviceUsage:
    """Measure what the devices of this process use, whatever they are.

    Args:
        during: What to run and watch; by default the devices are watched for `seconds`, while other
            threads go on.
        seconds: How long to watch where nothing is given to run.

    Raises:
        TPUValidationError: `seconds` is not above 0.
    """
    import jax

    if seconds <= 0:
        raise TPUValidationError(f"seconds={seconds:g} is no time to watch; give more than 0.")
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
    """Share of the time of `run` in which devices were busy, by a trace that is thrown away."""
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
    devices = [device for one in profile.times for device in one.devices]
    window = profile.recording.duration_s
    if not devices or not window:
        return 0.0  # the trace is there, and no op in it
    import jax

    # Devices that ran nothing have no track, and still count.
    return sum(device.busy_s for device in devices) / (window * jax.local_device_count())


def _total(memory: list[DeviceMemory], field: str) -> Measured:
    values = [getattr(one, field) for one in memory]
    if any(value is None for value in values):
        reasons = {one.reason or "the device does not report it" for one in memory}
        return Missing("; ".join(sorted(reasons)))
    return sum(values)

"""This machine's own figures: CPUs and memory (psutil), jax devices' memory, NVIDIA GPUs (NVML)."""

from collections.abc import Callable
from typing import Any

import psutil

from ...runtime.environment import jax_state
from ..readings import Reading, ReadingBuilder, Source

HOST_METRICS = ("host_cpu_utilization", "host_memory_used", "host_memory_total")
SHORTEST_S = 0.05  # seconds of CPU time to compare; the kernel counts hundredths of a second


class HostSource(Source):
    """Reads the CPU utilization since the reading before, and the memory in use.

    Args:
        process: Index of the process of the run.
    """

    name = "psutil"

    def __init__(self, *, process: int = 0) -> None:
        self._process = process
        self._before: tuple[float, float] | None = None

    def read(self) -> Reading:
        """Read the operating system's figures."""
        builder = ReadingBuilder(self.name, HOST_METRICS, process=self._process)
        try:
            memory = psutil.virtual_memory()
            # Available memory includes caches that can be freed at once.
            builder.add("host_memory_used", memory.total - memory.available)
            builder.add("host_memory_total", memory.total)
            self._add_cpu(builder)
        except (OSError, psutil.Error) as error:
            return builder.build(otherwise=f"the operating system does not report it: {error}")
        return builder.build()

    def _add_cpu(self, builder: ReadingBuilder) -> None:
        times = psutil.cpu_times()
        total = sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        idle = times.idle + getattr(times, "iowait", 0.0)
        before = self._before
        if before is None:
            self._before = (total, idle)
            builder.lack("host_cpu_utilization", "it needs two readings, and this is the first")
            return
        passed = total - before[0]
        if passed < SHORTEST_S:
            builder.lack(
                "host_cpu_utilization", "too little time has passed since the last reading"
            )
            return
        self._before = (total, idle)
        busy = 1.0 - (idle - before[1]) / passed
        builder.add("host_cpu_utilization", min(1.0, max(0.0, busy)))


# Names of the metrics in jax.
STATISTICS = {
    "memory_used": "bytes_in_use",
    "memory_total": "bytes_limit",
    "memory_peak": "peak_bytes_in_use",
}


class JaxSource(Source):
    """Reads `memory_stats()` of each local device, once the program has opened them.

    Args:
        process: Index of the process of the run.
    """

    name = "jax"

    def __init__(self, *, process: int = 0) -> None:
        self._process = process

    def read(self) -> Reading:
        """Read jax's memory statistics, if the program has opened its devices."""
        builder = ReadingBuilder(self.name, STATISTICS, process=self._process)
        if jax_state() != "initialised":
            return builder.build(otherwise="jax has not opened its devices in this process")
        import jax

        reason = "jax has no local devices"
        for chip, device in enumerate(jax.local_devices()):
            try:
                counted = device.memory_stats() or {}
            except (jax.errors.JaxRuntimeError, RuntimeError) as error:
                reason = f"{device.device_kind} no longer answers: {str(error).splitlines()[0]}"
                continue
            if not counted:
                reason = f"the runtime of {device.device_kind} reports no memory"
            for metric, statistic in STATISTICS.items():
                if statistic in counted:
                    builder.add(metric, counted[statistic], chip=chip)
        return builder.build(otherwise=reason)


GPU_METRICS = ("power_watts", "duty_cycle", "memory_used", "memory_total", "temperature_celsius")


class NvmlSource:
    """Reads the driver's figures; needs no CUDA and opens no context.

    Args:
        process: Index of the process of the run.
    """

    name = "nvml"

    def __init__(self, *, process: int = 0) -> None:
        self._process = process
        self._nvml: Any = None
        self._devices: list[Any] = []

    def read(self) -> Reading:
        """Read the figures of every GPU of this host."""
        builder = ReadingBuilder(self.name, GPU_METRICS, process=self._process)
        try:
            import pynvml
        except ImportError:
            return builder.build(otherwise="needs 'nvidia-ml-py': pip install 'tpukit[monitor]'")
        nvml: Any = pynvml  # its errors have a `value` that the module does not declare
        try:
            self._open(nvml)
        except nvml.NVMLError as error:
            return builder.build(otherwise=f"no NVIDIA driver answers here ({error})")
        lost = ""
        for chip, device in enumerate(self._devices):
            for metric, ask in _questions(nvml, device):
                try:
                    builder.add(metric, ask(), chip=chip)
                except nvml.NVMLError as error:
                    if error.value == nvml.NVML_ERROR_NOT_SUPPORTED:
                        builder.lack(metric, "this GPU does not report it")
                        continue
                    lost = f"GPU {chip} no longer answers ({error})"
        if lost:
            self.close()  # opened again at the next reading
        return builder.build(otherwise=lost or "there is no GPU here")

    def close(self) -> None:
        """Close the driver's library."""
        nvml, self._nvml, self._devices = self._nvml, None, []
        if nvml is not None:
            try:
                nvml.nvmlShutdown()
            except nvml.NVMLError:
                return  # already closed

    def _open(self, nvml: Any) -> None:
        if self._nvml is not None:
            return
        nvml.nvmlInit()
        self._nvml = nvml
        self._devices = [
            nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())
        ]


def _questions(nvml: Any, device: Any) -> list[tuple[str, Callable[[], float]]]:
    # NVML's "memory utilization" is the share of time with any memory access and not the share of
    # bandwidth, so it is not reported.
    return [
        ("power_watts", lambda: nvml.nvmlDeviceGetPowerUsage(device) / 1e3),
        ("duty_cycle", lambda: nvml.nvmlDeviceGetUtilizationRates(device).gpu / 100),
        ("memory_used", lambda: nvml.nvmlDeviceGetMemoryInfo(device).used),
        ("memory_total", lambda: nvml.nvmlDeviceGetMemoryInfo(device).total),
        (
            "temperature_celsius",
            lambda: nvml.nvmlDeviceGetTemperature(device, nvml.NVML_TEMPERATURE_GPU),
        ),
    ]

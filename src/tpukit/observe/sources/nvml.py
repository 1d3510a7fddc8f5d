"""Power, load and memory of NVIDIA GPUs, through NVML."""

from collections.abc import Callable
from typing import Any

from ..readings import Reading, ReadingBuilder

WANTED = ("power_watts", "duty_cycle", "memory_used", "memory_total", "temperature_celsius")


class NvmlSource:
    """Asks the driver; needs no CUDA and opens no context.

    Args:
        process: Index of the process of the run.
    """

    name = "nvml"

    def __init__(self, *, process: int = 0) -> None:
        self._process = process
        self._nvml: Any = None
        self._devices: list[Any] = []

    def read(self) -> Reading:
        """Ask about every GPU of this host."""
        found = ReadingBuilder(self.name, WANTED, process=self._process)
        try:
            import pynvml
        except ImportError:
            return found.build(otherwise="needs 'nvidia-ml-py': pip install 'tpukit[monitor]'")
        nvml: Any = pynvml  # its errors have a `value` that the module does not declare
        try:
            self._open(nvml)
        except nvml.NVMLError as error:
            return found.build(otherwise=f"no NVIDIA driver answers here ({error})")
        lost = ""
        for chip, device in enumerate(self._devices):
            for metric, ask in _questions(nvml, device):
                try:
                    found.add(metric, ask(), chip=chip)
                except nvml.NVMLError as error:
                    if error.value == nvml.NVML_ERROR_NOT_SUPPORTED:
                        found.lack(metric, "this GPU does not tell it")
                        continue
                    lost = f"GPU {chip} no longer answers ({error})"
        if lost:
            self.close()  # found anew next time, should it be back
        return found.build(otherwise=lost or "there is no GPU here")

    def close(self) -> None:
        """Let go of the driver."""
        nvml, self._nvml, self._devices = self._nvml, None, []
        if nvml is not None:
            try:
                nvml.nvmlShutdown()
            except nvml.NVMLError:
                return  # it is gone already

    def _open(self, nvml: Any) -> None:
        if self._nvml is not None:
            return
        nvml.nvmlInit()
        self._nvml = nvml
        self._devices = [
            nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())
        ]


def _questions(nvml: Any, device: Any) -> list[tuple[str, Callable[[], float]]]:
    # NVML's "memory utilization" is the share of time in which memory was used at all, not the
    # bandwidth that was used, so it is not reported as such.
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

"""The devices that modules run on here, and detection of Google's torch_tpu."""

import logging
import os
import sys
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from ..annotations import Device
from ..errors import TPUNotAvailableError
from ..hardware.detect import Kind, detect_accelerators
from ..models.adapters.torch_module.environment import torch_tpu_is_installed
from ..runtime.environment import open_devices
from ..runtime.versions import installed_version
from .config import TorchTPUConfig, tpu_settings

logger = logging.getLogger(__name__)

AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
Runtime = Literal["torchax", "torch_tpu"]
_KINDS: dict[str, Kind] = {"tpu": "tpu", "gpu": "gpu", "cuda": "gpu", "rocm": "gpu"}


@dataclass(frozen=True)
class FoundDevice:
    """The device that programs of this process run on by default.

    Attributes:
        device: jax's own device.
        kind: "tpu", "gpu" or "cpu".
        how: How it was detected, in a sentence.
        world_size: Processes of the job; each may have several devices.
        rank: Index of this process, from 0.
    """

    device: Device
    kind: Kind
    how: str
    world_size: int
    rank: int

    @property
    def is_distributed(self) -> bool:
        """Whether the job has other processes."""
        return self.world_size > 1


def find_device(settings: TorchTPUConfig) -> FoundDevice:
    """Return the device to run on; log a warning if it is not a TPU.

    Raises:
        TPUNotAvailableError: There is no TPU and validation is strict, or jax cannot start on the
            chosen platform.
    """
    import jax

    try:
        open_devices()
        device = jax.local_devices()[0]
    except RuntimeError as error:
        raise TPUNotAvailableError(
            f"jax found no device to run on ({error}); unset JAX_PLATFORMS, or set it to cpu."
        ) from error
    kind = _KINDS.get(device.platform, "cpu")
    count = jax.local_device_count()
    how = f"jax runs on {count} {device.device_kind} {'device' if count == 1 else 'devices'} here"
    if kind != "tpu":
        message = f"No TPU here: {how}"
        if settings.enable_strict_validation:
            raise TPUNotAvailableError(
                f"{message}, but enable_strict_validation requires a TPU; run on a TPU VM, or set "
                " config.hardware.tpu.enable_strict_validation = False."
            )
        logger.warning("%s; models run on %s", message, kind.upper(), extra={"kind": kind})
    return FoundDevice(device, kind, how, jax.process_count(), jax.process_index())


class JobProcess:
    """This process's place in its job, and its configuration.

    Args:
        config: A `KernelPyTorchConfig`, its `hardware.tpu`, or a `TPUConfig`.

    Raises:
        TPUNotAvailableError: There is no TPU and validation is strict.
    """

    def __init__(self, config: object = None) -> None:
        self.settings = tpu_settings(config)
        self.found = find_device(self.settings)

    @property
    def world_size(self) -> int:
        """Number of processes of the job; each may have several devices."""
        return self.found.world_size

    @property
    def rank(self) -> int:
        """Index of this process, from 0."""
        return self.found.rank

    @property
    def is_distributed(self) -> bool:
        """Whether the job has other processes."""
        return self.found.is_distributed


class XLADeviceManager(JobProcess):
    """The devices of this process and of the job.

    Args:
        config: A `KernelPyTorchConfig`, its `hardware.tpu`, or a `TPUConfig`.

    Raises:
        TPUNotAvailableError: There is no TPU and validation is strict.
    """

    @property
    def device(self) -> Device:
        """The device that programs of this process run on by default."""
        return self.found.device

    @property
    def devices(self) -> list[Device]:
        """All devices of the job, also those of other processes."""
        import jax

        return jax.devices()

    @property
    def local_devices(self) -> list[Device]:
        """The devices of this process."""
        import jax

        return jax.local_devices()

    @property
    def kind(self) -> Kind:
        """The kind of devices: "tpu", "gpu" or "cpu"."""
        return self.found.kind

    @cached_property
    def torch_tpu(self) -> "TorchTPU":
        """Google's torch backend on this machine, and which runtime runs modules."""
        return detect_torch_tpu()

    def __repr__(self) -> str:
        rank = f", rank {self.rank} of {self.world_size}" if self.is_distributed else ""
        return f"XLADeviceManager({self.found.how}{rank})"


@dataclass(frozen=True)
class TorchTPU:
    """Google's torch backend for TPUs, as detected on this machine.

    Attributes:
        version: The installed version; None if unknown or not installed.
        installed: Whether it can be imported.
        has_tpu: Whether this machine has a TPU; the backend needs one.
        registered: Whether it is torch's custom device in this process already.
        runs_on: The runtime of modules in this process: torch_tpu if it is registered, because
            torchax then cannot be loaded; otherwise torchax.
    """

    version: str | None
    installed: bool
    has_tpu: bool
    registered: bool
    runs_on: Runtime

    @property
    def advice(self) -> str:
        """An explanation, and how to use the other runtime."""
        if self.runs_on == "torch_tpu":
            return (
                "torch_tpu is registered as torch's only custom device, which torchax needs too, "
                "so "
                "a process can use only one of them: start Python with "
                f"{AUTOLOAD}=0 to run modules through torchax, or train with torch_tpu from the "
                "files of tpukit.torch.write_handover."
            )
        if not self.installed:
            return "torch_tpu is not installed; modules run through torchax."
        if not self.has_tpu:
            return "torch_tpu is installed but needs a TPU; modules run through torchax."
        why = f"{AUTOLOAD}=0 is set" if _autoload_is_off() else "torchax was loaded first"
        return (
            f"torch_tpu is installed but {why}, so modules run through torchax; start "
            f"Python without {AUTOLOAD}=0 to run a hand-over script with torch_tpu."
        )


def detect_torch_tpu() -> TorchTPU:
    """Detect torch_tpu without importing it, because the import may end the process."""
    registered = _custom_device_name() == "tpu"
    installed = torch_tpu_is_installed()
    return TorchTPU(
        version=installed_version("torch_tpu") if installed else None,
        installed=installed,
        has_tpu=detect_accelerators().kind == "tpu",
        registered=registered,
        runs_on="torch_tpu" if registered else "torchax",
    )


def _custom_device_name() -> str | None:
    """Return the name of torch's custom device; None before torch is imported."""
    if "torch" not in sys.modules:
        return None
    from torch._C import _get_privateuse1_backend_name  # pyright: ignore[reportPrivateUsage]  there is no public function

    return _get_privateuse1_backend_name()


def _autoload_is_off() -> bool:
    return os.environ.get(AUTOLOAD, "1") == "0"

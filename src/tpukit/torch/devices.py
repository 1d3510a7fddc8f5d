"""What a module runs on here: a TPU, else a GPU or CPU, and what torch_tpu has to do with it."""

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
        how: What it was told from, in a sentence.
        world_size: Processes of the job; each may hold several devices.
        rank: This process's number, from 0.
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
    """Find the device to run on; where it is no TPU, say so and go on with what there is.

    Raises:
        TPUNotAvailableError: There is no TPU and the settings ask for strict validation, or jax
            cannot start on the platform that was asked for.
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
        found = f"No TPU here: {how}"
        if settings.enable_strict_validation:
            raise TPUNotAvailableError(
                f"{found}, and enable_strict_validation refuses to go on with them; run it on a "
                "TPU VM, or set config.hardware.tpu.enable_strict_validation = False."
            )
        logger.warning("%s; models run on %s", found, kind.upper(), extra={"kind": kind})
    return FoundDevice(device, kind, how, jax.process_count(), jax.process_index())


class JobProcess:
    """What everything that was made with a configuration knows of this process.

    Args:
        config: A `KernelPyTorchConfig`, its `hardware.tpu`, or a `TPUConfig`.

    Raises:
        TPUNotAvailableError: There is no TPU and the configuration asks for strict validation.
    """

    def __init__(self, config: object = None) -> None:
        self.settings = tpu_settings(config)
        self.found = find_device(self.settings)

    @property
    def world_size(self) -> int:
        """How many processes the job has; each may hold several devices."""
        return self.found.world_size

    @property
    def rank(self) -> int:
        """This process's number, from 0."""
        return self.found.rank

    @property
    def is_distributed(self) -> bool:
        """Whether the job has other processes."""
        return self.found.is_distributed


class XLADeviceManager(JobProcess):
    """The devices of this process and of the whole job.

    Args:
        config: A `KernelPyTorchConfig`, its `hardware.tpu`, or a `TPUConfig`.

    Raises:
        TPUNotAvailableError: There is no TPU and the configuration asks for strict validation.
    """

    @property
    def device(self) -> Device:
        """The device that programs of this process run on by default."""
        return self.found.device

    @property
    def devices(self) -> list[Device]:
        """The devices of the whole job, those of other processes too."""
        import jax

        return jax.devices()

    @property
    def local_devices(self) -> list[Device]:
        """The devices of this process."""
        import jax

        return jax.local_devices()

    @property
    def kind(self) -> Kind:
        """What the devices are: "tpu", "gpu" or "cpu"."""
        return self.found.kind

    @cached_property
    def torch_tpu(self) -> "TorchTPU":
        """Whether Google's own torch backend is here, and who runs modules because of it."""
        return detect_torch_tpu()

    def __repr__(self) -> str:
        rank = f", rank {self.rank} of {self.world_size}" if self.is_distributed else ""
        return f"XLADeviceManager({self.found.how}{rank})"


@dataclass(frozen=True)
class TorchTPU:
    """Google's own torch backend for TPUs, as found on this machine.

    Attributes:
        version: The installed one; None where it is not installed or says none.
        installed: Whether it can be imported.
        has_tpu: Whether this machine has a TPU, without which it does nothing.
        registered: Whether it has taken torch's custom device in this process already.
        runs_on: Who runs modules in this process: torch_tpu once it is registered, since torchax
            then cannot be loaded; torchax otherwise.
    """

    version: str | None
    installed: bool
    has_tpu: bool
    registered: bool
    runs_on: Runtime

    @property
    def advice(self) -> str:
        """What this means, and the way to the other one."""
        if self.runs_on == "torch_tpu":
            return (
                "torch_tpu has taken torch's one custom device, which torchax needs as well, so "
                "that only one of them can live in a process: start Python with "
                f"{AUTOLOAD}=0 to run modules through torchax here, or train with torch_tpu from "
                "the files that tpukit.torch.write_handover made."
            )
        if not self.installed:
            return "torch_tpu is not installed; modules run through torchax."
        if not self.has_tpu:
            return "torch_tpu is installed and does nothing without a TPU; torchax runs modules."
        kept = f"{AUTOLOAD}=0 keeps it out" if _autoload_is_off() else "torchax was loaded first"
        return (
            f"torch_tpu is installed and {kept} of this process, so torchax runs modules; start "
            f"Python without {AUTOLOAD}=0 to run a hand-over script with torch_tpu."
        )


def detect_torch_tpu() -> TorchTPU:
    """Find out about torch_tpu without importing it: the import may end the process."""
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
    """Return the name that torch's custom device goes by; None before torch is imported."""
    if "torch" not in sys.modules:
        return None
    from torch._C import _get_privateuse1_backend_name  # pyright: ignore[reportPrivateUsage]  no public way to ask

    return _get_privateuse1_backend_name()


def _autoload_is_off() -> bool:
    return os.environ.get(AUTOLOAD, "1") == "0"

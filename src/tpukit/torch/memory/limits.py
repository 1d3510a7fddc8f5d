"""How much memory tensors may take: the configured chip's, else of what is here."""

from ...hardware import Chip, Figure, detect_accelerators, get_chip
from ..config import TorchTPUConfig


def memory_limit(settings: TorchTPUConfig) -> Figure:
    """Return the bytes that may be used, with where the number came from.

    It is the memory of the configured chip (or what `memory_per_chip`, `v6e_memory_gb` and
    `v7_memory_gb` say instead), else of the accelerator that is here, else of the host; times
    `memory_fraction`.
    """
    return _capacity(settings).scaled(settings.memory_fraction)


def _capacity(settings: TorchTPUConfig) -> Figure:
    stated = settings.resolved().memory_per_chip
    chip = settings.chip
    if chip is not None:
        usable = chip.hbm_usable_bytes
        if stated is None or (usable.value is not None and usable.value <= stated):
            return usable
    if stated is not None:
        return Figure(stated, "B", "user", "memory_per_chip, v6e_memory_gb or v7_memory_gb")
    return _here()


def _here() -> Figure:
    """Return the memory of a TPU here, else of a GPU that torch can use, else of the host."""
    tpu = _chip_here()
    if tpu is not None:
        return tpu.hbm_usable_bytes
    import psutil
    import torch

    if torch.cuda.is_available():
        name, total = torch.cuda.get_device_name(0), torch.cuda.mem_get_info(0)[1]
        return Figure(total, "B", "measured", f"memory of {name}, by the driver")
    return Figure(psutil.virtual_memory().total, "B", "measured", "memory of this host")


def _chip_here() -> Chip | None:
    found = detect_accelerators()
    known = found.kind == "tpu" and found.generation is not None
    return get_chip(found.generation) if known and found.generation else None

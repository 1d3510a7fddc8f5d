"""Detect this machine's accelerators from a few small files, without jax and without network."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ..errors import SliceError
from ..shown import Renderable, Shown
from .catalog import list_chips
from .figure import count_text
from .slice import Slice

GOOGLE_VENDOR = "0x1ae0"
TPU_VM_VARIABLES = ("TPU_ACCELERATOR_TYPE", "TPU_WORKER_ID", "TPU_CHIPS_PER_HOST_BOUNDS")
Kind = Literal["tpu", "gpu", "cpu"]


@dataclass(frozen=True, kw_only=True)
class Accelerators(Shown):
    """The accelerators of this machine, with the evidence for them.

    Attributes:
        kind: Where programs run on this machine: "tpu", "gpu" or "cpu".
        count: TPU chips or GPUs of this host; CPUs where it has neither.
        generation: Name of the TPU generation, if the PCI bus or the environment names it.
        slice_name: The slice this host belongs to, if the environment names it.
        evidence: The files and variables that the facts come from.
    """

    kind: Kind
    count: int
    generation: str | None = None
    slice_name: str | None = None
    evidence: tuple[str, ...] = ()

    def __str__(self) -> str:
        units = {"tpu": "TPU chip", "gpu": "NVIDIA GPU", "cpu": "CPU"}[self.kind]
        generation = f" ({self.generation})" if self.generation else ""
        where = f", part of {self.slice_name}" if self.slice_name else ""
        return f"{count_text(self.count, units)}{generation}{where}"

    def __rich__(self) -> Renderable:
        from .tables import facts_table

        table = facts_table(str(self))
        for line in self.evidence:
            table.add_row("seen", "", line)
        return table


def detect_accelerators(
    *, root: str | Path = "/", environment: Mapping[str, str] | None = None
) -> Accelerators:
    """Return this machine's TPUs, else its NVIDIA GPUs, else its CPUs, without ever waiting.

    Args:
        root: Root of the file system to read; other values than "/" are for tests and containers.
        environment: The environment to read; `os.environ` by default.
    """
    base = Path(root)
    env = os.environ if environment is None else environment
    chips, generation, evidence = _tpu_chips(base, env)
    if chips:
        named = _slice_named(env, evidence)
        return Accelerators(
            kind="tpu",
            count=chips,
            generation=generation or (named.chip.name if named else None),
            slice_name=str(named) if named else None,
            evidence=tuple(evidence),
        )
    gpus = _nvidia_gpus(base, evidence)
    if gpus:
        return Accelerators(kind="gpu", count=gpus, evidence=tuple(evidence))
    evidence.append("no TPU on the PCI bus or in /dev, no NVIDIA driver")
    return Accelerators(kind="cpu", count=os.cpu_count() or 1, evidence=tuple(evidence))


def _tpu_chips(base: Path, env: Mapping[str, str]) -> tuple[int, str | None, list[str]]:
    """Count TPU chips, first by PCI device id, which also identifies the generation."""
    generations = {id_: chip.name for chip in list_chips() for id_ in chip.pci_device_ids}
    found: list[str] = []
    for device in sorted(_glob(base, "sys/bus/pci/devices/*")):
        # The vendor alone is not enough: Google's network card has the same one on every VM.
        if _text(device / "vendor") == GOOGLE_VENDOR and _text(device / "device") in generations:
            found.append(generations[_text(device / "device")])
    if found:
        return len(found), found[0], [f"{len(found)} TPU chips of {found[0]} on the PCI bus"]
    nodes = _glob(base, "dev/accel[0-9]*")
    if nodes:
        return len(nodes), None, [f"{len(nodes)} device nodes /dev/accel*"]
    # Newer TPUs are handed to containers through VFIO, which other devices use as well.
    groups = _glob(base, "dev/vfio/[0-9]*")
    if groups and any(name in env for name in TPU_VM_VARIABLES):
        return len(groups), None, [f"{len(groups)} VFIO groups and the environment of a TPU VM"]
    return 0, None, []


def _nvidia_gpus(base: Path, evidence: list[str]) -> int:
    gpus = len(_glob(base, "proc/driver/nvidia/gpus/*"))
    if gpus:
        evidence.append(f"{gpus} GPUs under /proc/driver/nvidia")
        return gpus
    nodes = _glob(base, "dev/nvidia[0-9]*") or _glob(base, "dev/dxg")  # the latter in WSL
    if nodes:
        evidence.append(f"device nodes {', '.join(sorted(node.name for node in nodes))} in /dev")
    return len(nodes)


def _slice_named(env: Mapping[str, str], evidence: list[str]) -> Slice | None:
    """Return the slice that the environment names; an unreadable name is only evidence."""
    name = env.get("TPU_ACCELERATOR_TYPE", "")
    if not name:
        return None
    try:
        named = Slice.parse(name)
    except SliceError:
        evidence.append(f"TPU_ACCELERATOR_TYPE={name}, which names no slice in the catalog")
        return None
    evidence.append(f"TPU_ACCELERATOR_TYPE={name}")
    return named


def _glob(base: Path, pattern: str) -> list[Path]:
    try:
        return list(base.glob(pattern))
    except OSError:
        return []


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8", errors="replace").strip().lower()
    except OSError:
        return ""

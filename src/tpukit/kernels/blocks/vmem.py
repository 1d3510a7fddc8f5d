"""How much of a core's VMEM a kernel may take, and which blocks fit in it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from ...errors import TPUKernelError
from ...hardware import get_chip
from ..registry.op import Blocks, KernelCase, Op, shape_text

MIB = 2**20
# What libtpu 0.0.42.1 lets a kernel's windows take unless the kernel asks for more: found by
# compiling ever larger windows until it answered E1001 (v4 and older: their whole VMEM).
SCOPED_LIMIT_BYTES = {
    **dict.fromkeys(("v2", "v3", "v4", "v5e", "v5p"), 16 * MIB),
    **dict.fromkeys(("v6e", "7x"), 32 * MIB),
}
# "Used 64.00M of 63.94M vmem", says the same compiler of v5p, and the like of v6e.
RESERVED_BYTES = 64 * 1024


@dataclass(frozen=True)
class VmemUse:
    """What one choice of blocks takes of one core's VMEM.

    Attributes:
        used_bytes: Scratch and double-buffered blocks, as the op counts them.
        capacity_bytes: What the chip has for one kernel.
        limit_bytes: What to give as `vmem_limit_bytes`; None when the compiler's own will do.
    """

    used_bytes: int
    capacity_bytes: int
    limit_bytes: int | None

    def to_dict(self) -> dict[str, Any]:
        """The three numbers by name."""
        return {
            "used_bytes": {"value": self.used_bytes, "origin": "model"},
            "capacity_bytes": {"value": self.capacity_bytes, "origin": "datasheet"},
            "limit_bytes": self.limit_bytes,
        }


def vmem_capacity_bytes(chip: str | None) -> int:
    """What one kernel can have on `chip`; with None, on every generation.

    Raises:
        TPUKernelError: The catalog does not know the VMEM of that chip.
    """
    if chip is None:
        return min(SCOPED_LIMIT_BYTES.values()) - RESERVED_BYTES
    figure = get_chip(chip).vmem_bytes
    if figure.value is None:
        raise TPUKernelError(
            f"The VMEM of {chip} is not known ({figure.note}); compile for another generation, or "
            "give blocks= yourself."
        )
    return int(figure.value) - RESERVED_BYTES


def scoped_limit_bytes(chip: str | None) -> int:
    """What a kernel gets without asking; the least of all generations where nobody knows."""
    known = SCOPED_LIMIT_BYTES
    name = None if chip is None else get_chip(chip).name
    return known.get(name or "", min(known.values()))


def vmem_limit_bytes(used_bytes: int, chip: str | None) -> int | None:
    """What to ask the compiler for, given what is used; None when its own limit will do.

    The compiler adds spilled registers to what a kernel declares, so a quarter is left for them.
    """
    wanted = used_bytes + used_bytes // 4
    if wanted <= scoped_limit_bytes(chip):
        return None
    return min(wanted, vmem_capacity_bytes(chip))


def check_vmem(op: Op, case: KernelCase, blocks: Blocks, chip: str | None) -> VmemUse:
    """What `blocks` take on `chip`.

    Raises:
        TPUKernelError: More than there is; the message names the largest blocks that fit.
    """
    used, capacity = op.vmem_bytes(case, blocks), vmem_capacity_bytes(chip)
    if used <= capacity:
        return VmemUse(used, capacity, vmem_limit_bytes(used, chip))
    where = chip or "some generation"
    fits = largest_that_fits(op, case, chip)
    way_out = (
        "no blocks of its space fit: make the arrays smaller"
        if fits is None
        else f"the largest that fit are {_text(fits)}, {_mib(op.vmem_bytes(case, fits))}"
    )
    raise TPUKernelError(
        f"{op.name} with {_text(blocks)} on {', '.join(map(shape_text, case.arguments))} takes "
        f"{_mib(used)} of VMEM and a core of {where} has {_mib(capacity)}; {way_out}."
    )


def largest_that_fits(op: Op, case: KernelCase, chip: str | None) -> Blocks | None:
    """The blocks of an op's space that take most of the VMEM without exceeding it."""
    capacity = vmem_capacity_bytes(chip)
    space: Iterable[Blocks] = op.block_space(case, chip or "v5e")
    fitting = [blocks for blocks in space if op.vmem_bytes(case, blocks) <= capacity]
    return max(fitting, key=lambda blocks: op.vmem_bytes(case, blocks), default=None)


def _text(blocks: Blocks) -> str:
    return ", ".join(f"{name}={value}" for name, value in blocks.to_dict().items())


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:.1f} MiB"

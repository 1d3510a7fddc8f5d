"""How much of a core's VMEM a kernel may use, and which blocks fit in it."""

from collections.abc import Iterable
from dataclasses import dataclass

from ...errors import TPUKernelError
from ...hardware import get_chip, list_chips
from ...hardware.catalog import CHIP_FOR_KERNEL_BLOCKS
from ...plain_data import JsonObject
from ..registry.op import Blocks, KernelCase, Op, shape_text

MIB = 2**20
# What libtpu 0.0.42.1 grants a kernel's windows unless the kernel requests more.
SCOPED_LIMIT_BYTES = {
    chip.name: int(limit.require("the blocks of a kernel"))
    for chip in list_chips()
    if (limit := chip.kernels.get("scoped_vmem_bytes")) is not None
}
# The same compiler reports "Used 64.00M of 63.94M vmem" for v5p, and similar for v6e.
RESERVED_BYTES = 64 * 1024


@dataclass(frozen=True)
class VmemUse:
    """The VMEM of one choice of blocks on one core.

    Attributes:
        used_bytes: Scratch and double-buffered blocks, as the op counts them.
        capacity_bytes: VMEM of the chip for one kernel.
        limit_bytes: The value for `vmem_limit_bytes`; None where the compiler's own limit is
            enough.
    """

    used_bytes: int
    capacity_bytes: int
    limit_bytes: int | None

    def to_dict(self) -> JsonObject:
        """Return the three numbers by name."""
        return {
            "used_bytes": {"value": self.used_bytes, "origin": "model"},
            "capacity_bytes": {"value": self.capacity_bytes, "origin": "datasheet"},
            "limit_bytes": self.limit_bytes,
        }


def vmem_capacity_bytes(chip: str | None) -> int:
    """Return the VMEM for one kernel on `chip`; with None, the least of all generations.

    Raises:
        TPUKernelError: The catalog has no VMEM size for that chip.
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
    """Return the default VMEM limit of a kernel; with None, the least of all generations."""
    known = SCOPED_LIMIT_BYTES
    name = None if chip is None else get_chip(chip).name
    return known.get(name or "", min(known.values()))


def vmem_limit_bytes(used_bytes: int, chip: str | None) -> int | None:
    """Return the VMEM limit to request from the compiler; None where its own limit is enough.

    The compiler adds spilled registers to the VMEM that a kernel declares, so a quarter more is
    requested.
    """
    wanted = used_bytes + used_bytes // 4
    if wanted <= scoped_limit_bytes(chip):
        return None
    return min(wanted, vmem_capacity_bytes(chip))


def check_vmem(op: Op, case: KernelCase, blocks: Blocks, chip: str | None) -> VmemUse:
    """Return the VMEM that `blocks` use on `chip`.

    Raises:
        TPUKernelError: They use more than there is; the message names the largest blocks that fit.
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
        f"{_mib(used)} of VMEM, but a core of {where} has {_mib(capacity)}; {way_out}."
    )


def largest_that_fits(op: Op, case: KernelCase, chip: str | None) -> Blocks | None:
    """Return the blocks of an op's space that use the most VMEM and still fit."""
    capacity = vmem_capacity_bytes(chip)
    space: Iterable[Blocks] = op.block_space(case, chip or CHIP_FOR_KERNEL_BLOCKS)
    fitting = [blocks for blocks in space if op.vmem_bytes(case, blocks) <= capacity]
    return max(fitting, key=lambda blocks: op.vmem_bytes(case, blocks), default=None)


def _text(blocks: Blocks) -> str:
    return ", ".join(f"{name}={value}" for name, value in blocks.to_dict().items())


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:.1f} MiB"

"""The largest preset that a slice trains, by the memory model alone."""

from functools import cache

from ...hardware import Slice
from ...hardware.listings import SliceListing
from ...hardware.prices import PriceBook
from ...models.presets import get_preset, list_presets
from ..cost.memory_model import MeshRoles, estimate_memory_bytes, rounds_first
from ..cost.model_shape import ModelShape, shape_of

SEQUENCE_LENGTH = 2048
ASSUMED = f"one sequence of {SEQUENCE_LENGTH:,} tokens a device, adamw, fsdp, full remat"


def largest_trained(where: Slice) -> str | None:
    """Name the preset with the most parameters that fits, or None where none does.

    `ASSUMED` says how it is trained; `tpukit check` asks the compiler (origin here: model).
    """
    usable = where.chip.per_device(where.chip.hbm_usable_bytes).value
    if usable is None:
        return None
    for shape in _largest_first():
        length = min(SEQUENCE_LENGTH, shape.max_seq_len)
        needed = estimate_memory_bytes(
            shape,
            MeshRoles(fsdp=where.devices),
            per_device_batch=1,
            sequence_length=length,
            whole_copy=rounds_first(where.chip.name),
        )
        if needed.total <= usable:
            return shape.name
    return None


def list_slices(generation: str, book: PriceBook) -> SliceListing:
    """List the slices of a generation with their prices and the largest preset each trains."""
    return SliceListing.of(generation, book, largest=largest_trained, assumed=ASSUMED)


@cache
def _largest_first() -> tuple[ModelShape, ...]:
    shapes = [shape_of(get_preset(name)) for name in list_presets()]
    return tuple(sorted(shapes, key=lambda shape: -shape.parameters))

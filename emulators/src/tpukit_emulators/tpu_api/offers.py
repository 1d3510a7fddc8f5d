"""What the emulated API offers where: accelerator types by zone, and runtime versions."""

from functools import cache

from tpukit.hardware import Slice
from tpukit.hardware.catalog import get_chip
from tpukit.hardware.slice import list_slices
from tpukit.hardware.topology import format_shape

from ..holding import Zone

# https://cloud.google.com/tpu/docs/runtimes, and the name of document 004's TensorFlow 2.8.0.
RUNTIME_VERSIONS = (
    "tpu-ubuntu2204-base",
    "tpu-vm-tf-2.8.0",
    "tpu-vm-tf-2.8.0-pod",
    "tpu-vm-tf-2.17.1-pjrt",
    "tpu-vm-tf-2.17.1-pod-pjrt",
    "v2-alpha-tpuv4",
    "v2-alpha-tpuv5",
    "v2-alpha-tpuv5-lite",
    "v2-alpha-tpuv6e",
)
# AcceleratorConfig.Type by generation.
CONFIG_TYPES = {
    "v2": "V2",
    "v3": "V3",
    "v4": "V4",
    "v5e": "V5LITE_POD",
    "v5p": "V5P",
    "v6e": "V6E",
}


@cache
def _slices_of(generation: str) -> dict[str, Slice]:
    """Every size of a generation that the API names, by that name."""
    named = {one.api_name: one for one in list_slices(generation)}
    return {name: one for name, one in named.items() if name is not None}


def types_in(zone: Zone) -> dict[str, Slice]:
    """Accelerator types that a zone offers, by name."""
    kinds = {*zone.capacity, *(one.kind for one in zone.reservations.values())}
    return {
        name: one for generation in sorted(kinds) for name, one in _slices_of(generation).items()
    }


def configured(config_type: str, topology: str) -> Slice:
    """Return the slice of an `accelerator_config`.

    Raises:
        SliceError: There is no such slice.
    """
    generation = {name: one for one, name in CONFIG_TYPES.items()}[config_type]
    return Slice.of(get_chip(generation).name, topology=topology)


def topology_of(one: Slice) -> str:
    """Return a slice's shape as the API writes it."""
    return format_shape(one.topology)

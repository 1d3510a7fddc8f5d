"""What the emulated zones offer: machine types with TPUs, and the families quota is counted by."""

from collections.abc import Mapping
from dataclasses import dataclass

from tpukit.hardware.catalog import get_chip

from ..holding import Zone

# Compute Engine has TPUs from v5p on; the families are those of `tpus_per_tpu_family`.
# https://docs.cloud.google.com/compute/docs/instance-groups/about-workload-policies
FAMILIES = {"v5p": "CT5P", "v6e": "CT6E", "7x": "TPU7X"}
# Some of where they are: https://cloud.google.com/tpu/docs/regions-zones.
ZONES: Mapping[str, Zone] = {
    "us-central1-a": Zone({"v5p": 256}),
    "us-central1-c": Zone({"7x": 256}),
    "us-east5-a": Zone({"v5p": 1024, "v6e": 256}),
    "us-east5-b": Zone({"v6e": 1024}),
    "europe-west4-b": Zone({"v5p": 512}),
}


@dataclass(frozen=True)
class MachineType:
    """A machine with TPUs: `ct6e-standard-4t` has 4 chips of generation v6e."""

    name: str
    generation: str
    chips: int

    @property
    def devices(self) -> int:
        """What jax finds on it."""
        return self.chips * get_chip(self.generation).devices_per_chip


def machine_types(zone: Zone) -> dict[str, MachineType]:
    """Return the machine types of a zone by name."""
    found: dict[str, MachineType] = {}
    kinds = {*zone.capacity, *(one.kind for one in zone.reservations.values())}
    for generation in sorted(kinds & set(FAMILIES)):
        for name in get_chip(generation).gke_machine_types:
            chips = int(name.rsplit("-", 1)[1].removesuffix("t"))
            found[name] = MachineType(name, generation, chips)
    return found


def region_of(zone: str) -> str:
    """Return the region that a zone is in."""
    return zone.rsplit("-", 1)[0]

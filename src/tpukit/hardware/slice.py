"""A slice of TPUs: its chips, its shape, and everything derived from them."""

import math
from dataclasses import dataclass
from itertools import product

from ..errors import SliceError
from ..plain_data import JsonObject
from ..shown import Facts, Renderable, Shown
from .catalog import Chip, get_chip
from .figure import Figure
from .formats import PEAKS
from .naming import (
    canonical_name,
    chips_named,
    no_such_count,
    no_such_shape,
    no_topology,
    read_name,
)
from .topology import Shape, TopologyRules, format_shape, parse_shape


@dataclass(frozen=True, repr=False)
class Slice(Shown):
    """Chips joined by one torus, or several such slices joined by the data-centre network.

    Make one with `Slice.parse("v6e-64")` or `Slice.of("v6e", chips=64)`. `chips`, `hosts` and
    `devices` are totals over all slices; `topology` is the shape of each. `str(s)` is the
    canonical name, and `Slice.parse(str(s)) == s`.
    """

    chip: Chip
    topology: Shape
    num_slices: int = 1
    _facts = (
        "name generation=chip.name topology num_slices chips hosts devices devices_per_host wraps "
        "api_name gke_accelerator gke_topology needs_gke libtpu_topology libtpu_options "
        "hbm_bytes hbm_usable_bytes bisection_gbps dcn_gbps host_ram_bytes"
    )

    def __post_init__(self) -> None:
        rules = rules_of(self.chip)
        if not rules.is_legal(self.topology):
            raise no_such_shape(self.chip, self.topology)
        if self.num_slices < 1:
            raise SliceError(f"A job has at least one slice, not {self.num_slices}.")

    @classmethod
    def parse(cls, text: str) -> "Slice":
        """Read any spelling: `v4-32`, `v5litepod-16`, `v6e:16x16`, `tpu7x-4x4x4`, `2xv6e-256`.

        Raises:
            SliceError: The name is ambiguous, or no such slice exists; the message names the
                valid choices.
        """
        name = read_name(text)
        rules_of(name.chip)
        return cls.of(
            name.chip.name,
            chips=chips_named(name),
            topology=name.shape,
            num_slices=name.num_slices,
        )

    @classmethod
    def of(
        cls,
        generation: str,
        *,
        chips: int | None = None,
        topology: str | Shape | None = None,
        num_slices: int = 1,
    ) -> "Slice":
        """Return the slice of a generation with a number of chips, a shape, or both.

        Args:
            generation: Any name `get_chip` takes.
            chips: Chips of one slice, even where the generation's names count cores.
            topology: Shape of one slice; the most cubic one for `chips` when left out.
            num_slices: Slices joined by the data-centre network.

        Raises:
            SliceError: There is no such slice; the message names the valid ones.
        """
        chip = get_chip(generation)
        rules = rules_of(chip)
        if topology is None:
            if chips is None:
                raise SliceError(f"A slice of {chip.name} needs chips or a topology; give one.")
            if chips not in rules.by_chips:
                raise no_such_count(chip, chips)
            return cls(chip, rules.by_chips[chips][0], num_slices)
        shape = parse_shape(topology) if isinstance(topology, str) else tuple(topology)
        if not rules.is_legal(shape) or (chips is not None and math.prod(shape) != chips):
            raise no_such_shape(chip, shape, chips=chips)
        return cls(chip, shape, num_slices)

    @property
    def name(self) -> str:
        """The canonical name, which `str` returns too."""
        return str(self)

    def __str__(self) -> str:
        return canonical_name(self.chip, self.topology, num_slices=self.num_slices)

    def __repr__(self) -> str:
        return f"Slice.parse({str(self)!r})"

    @property
    def chips_per_slice(self) -> int:
        """Chips of one slice."""
        return math.prod(self.topology)

    @property
    def chips(self) -> int:
        """Chips of all slices."""
        return self.chips_per_slice * self.num_slices

    @property
    def devices(self) -> int:
        """`len(jax.devices())` on this slice."""
        return self.chips * self.chip.devices_per_chip

    @property
    def hosts(self) -> int:
        """Host machines, each running one process."""
        return rules_of(self.chip).hosts(self.topology) * self.num_slices

    @property
    def chips_per_host(self) -> int:
        """Chips of one host."""
        return self.chips // self.hosts

    @property
    def devices_per_host(self) -> int:
        """`jax.local_device_count()` on each host."""
        return self.devices // self.hosts

    @property
    def wraps(self) -> tuple[bool, ...]:
        """Whether the ends of each axis of the topology are linked into a ring."""
        return rules_of(self.chip).wraps(self.topology)

    @property
    def bisection_gbps(self) -> Figure:
        """GB/s one way across the narrowest cut that halves one slice."""
        links = rules_of(self.chip).bisection_links(self.topology)
        if not links:
            return Figure.missing("GB/s", "a single chip has no links to cut.")
        return self.chip.ici_link_gbps.scaled(links)

    def peak_tflops(self, dtype: str = "bf16") -> Figure:
        """Return the peak of all chips together for a number format."""
        return self.chip.peak(dtype).scaled(self.chips)

    @property
    def hbm_bytes(self) -> Figure:
        """High-bandwidth memory of all chips together."""
        return self.chip.hbm_bytes.scaled(self.chips)

    @property
    def hbm_usable_bytes(self) -> Figure:
        """HBM of all chips that the compiler lets programs use."""
        return self.chip.hbm_usable_bytes.scaled(self.chips)

    @property
    def host_ram_bytes(self) -> Figure:
        """Memory of each host."""
        return self.chip.host_ram_per_chip.scaled(self.chips_per_host)

    @property
    def dcn_gbps(self) -> Figure:
        """GB/s one slice can send over the data-centre network."""
        return self.chip.dcn_gbps.scaled(self.chips_per_slice)

    @property
    def needs_gke(self) -> bool:
        """Whether only Google Kubernetes Engine offers it."""
        return bool(self.chip.needs_gke)

    @property
    def api_name(self) -> str | None:
        """Accelerator type of the Cloud TPU API; None where that API does not offer it.

        A request for a shape other than the default of its size names the topology as well.
        """
        if self.chip.api_prefix is None:
            return None
        return f"{self.chip.api_prefix}-{self.chips_per_slice * self.chip.counted_per_chip}"

    @property
    def gke_accelerator(self) -> str | None:
        """Value of GKE's `cloud.google.com/gke-tpu-accelerator` label."""
        return self.chip.gke_accelerator

    @property
    def gke_topology(self) -> str:
        """Value of GKE's `cloud.google.com/gke-tpu-topology` label."""
        return format_shape(self.topology)

    @property
    def libtpu_topology(self) -> str:
        """`topology_name` for `jax.experimental.topologies.get_topology_desc`."""
        return f"{self.chip.libtpu_name}:{format_shape(self.topology)}"

    @property
    def libtpu_options(self) -> JsonObject:
        """The other keyword arguments of `get_topology_desc`; empty where its defaults apply."""
        rules = rules_of(self.chip)
        options: JsonObject = {}
        if self.chip.libtpu_chip_config:
            options["chip_config_name"] = self.chip.libtpu_chip_config
        bounds = rules.bounds_of_host(self.topology)
        if bounds != rules.host_bounds:
            options["chips_per_host_bounds"] = bounds
        if self.num_slices > 1:
            options["num_slices"] = self.num_slices
        return options

    def to_dict(self) -> JsonObject:
        """Return every property; figures have their provenance."""
        return {
            **super().to_dict(),
            "peak_tflops": {dtype: self.peak_tflops(dtype).to_dict() for dtype in PEAKS},
        }

    def __rich__(self) -> Renderable:
        from .tables import slice_table

        return slice_table(self)


def list_slices(generation: str) -> tuple[Slice, ...]:
    """Return one slice per size of a generation, in its default shape, smallest first."""
    chip = get_chip(generation)
    rules = rules_of(chip)
    return tuple(Slice(chip, shapes[0]) for shapes in rules.by_chips.values())


def rules_of(chip: Chip) -> TopologyRules:
    """Return the shape rules of a generation; raise SliceError if it has no named slices."""
    if chip.rules is None:
        raise no_topology(chip)
    return chip.rules


@dataclass(frozen=True, slots=True)
class ChipPosition(Facts):
    """One chip of a slice.

    Attributes:
        process: Index of the process on its host.
        chip: Its index on that host.
        slice_index: Index of its slice, from 0.
        coordinates: Position along each axis of the topology.
    """

    process: int
    chip: int
    slice_index: int
    coordinates: tuple[int, ...]


def chip_positions(target: Slice) -> tuple[ChipPosition, ...]:
    """Return every chip of a slice, host after host, in libtpu's order.

    Hosts tile a slice in blocks of their bounds. Both hosts and the chips of one host are counted
    along x first, then y, then z. Process 0 is the first host of the first slice.
    """
    shape = target.topology
    bounds = rules_of(target.chip).bounds_of_host(shape)[: len(shape)]
    blocks = tuple(length // bound for length, bound in zip(shape, bounds, strict=True))
    positions: list[ChipPosition] = []
    process = 0
    for slice_index in range(target.num_slices):
        for block in _along_x_first(blocks):
            corner = tuple(at * bound for at, bound in zip(block, bounds, strict=True))
            for chip, inside in enumerate(_along_x_first(bounds)):
                at = tuple(start + step for start, step in zip(corner, inside, strict=True))
                positions.append(ChipPosition(process, chip, slice_index, at))
            process += 1
    return tuple(positions)


def _along_x_first(shape: Shape) -> list[tuple[int, ...]]:
    return [at[::-1] for at in product(*(range(length) for length in reversed(shape)))]

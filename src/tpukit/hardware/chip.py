"""One TPU generation: its names, its structure and every figure of a chip with its source."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..errors import SliceError
from ..shown import Shown
from .figure import Figure
from .formats import PEAKS, NumberFormat, PeakName, parse_format
from .topology import TopologyRules


@dataclass(frozen=True, slots=True)
class MatrixProducts:
    """Formats that a matrix unit multiplies as they are: each of the left with each of the right.

    The right operand is the one that stays in the unit: a model's weights.
    """

    left: tuple[str, ...]
    right: tuple[str, ...]

    def __str__(self) -> str:
        if set(self.left) == set(self.right):
            return " · ".join(self.left)
        return f"{' · '.join(self.left)} with {' · '.join(self.right)}"

    def to_dict(self) -> dict[str, list[str]]:
        """Both lists."""
        return {"left": list(self.left), "right": list(self.right)}


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Chip(Shown):
    """One TPU generation. Rates in `gbps` are gigabytes (10^9 bytes) a second.

    Attributes:
        name: "v2" … "v6e", "7x", "8i", "8t".
        device_kinds: What `jax.Device.device_kind` says of it.
        pci_device_ids: What Linux calls it on the PCI bus, as jax lists them.
        name_counts: What the number in a slice's name counts: "cores", "chips", or "shape" when
            slices are named by their shape because numbers are read in two ways.
        cores_per_chip: TensorCores.
        devices_per_chip: JAX devices; each has an equal share of the chip's memory and peak.
        chips_per_host: Of multi-host slices; None when not known.
        libtpu_name: What the offline compiler calls it; None when it does not know it.
        interconnect: What joins the chips of a slice: "2D torus", "3D torus" or "Boardfly".
        rules: Legal shapes; None when no slice of it can be named.
        no_slices: Why none can; "" where there are rules.
        peak_tflops: Peak of the chip by type: bf16, fp8, int8, int4.
        matrix_products: Which pairs of formats the matrix unit multiplies as they are; others are
            widened first.
        hbm_usable_bytes: What the compiler lets the programs of one chip use.
        ici_link_gbps: One link, one way, as the vendor states it.
        ici_link_effective_gbps: The same as step-time models use it.
        dcn_gbps: Data-centre network, of one chip.
        pcie_gbps: Between host and chip, each way, as transfers reach it.
        host_ram_bytes: Of a host with `chips_per_host` chips.
        vmem_bytes: Of one core; so are `smem_bytes`, `mxus_per_core`.
        cmem_bytes: Of the chip.
        sublanes: Rows of one vector register, of `lanes` 32-bit values each.
        mxu_size: Edge of the square matrix unit.
        measured: Published microbenchmarks: ceilings for a predictor.
    """

    name: str
    title: str
    generation: int
    slice_prefix: str
    aliases: tuple[str, ...]
    shape_only_aliases: tuple[str, ...]
    device_kinds: tuple[str, ...]
    pci_device_ids: tuple[str, ...]
    api_prefix: str | None
    gke_accelerator: str | None
    gke_machine_types: tuple[str, ...]
    needs_gke: bool | None
    name_counts: str
    cores_per_chip: int
    devices_per_chip: int
    chips_per_host: int | None
    ici_links_per_chip: int | None
    libtpu_name: str | None
    libtpu_chip_config: str | None
    pod_chips: int
    structure_source: str
    interconnect: str
    topology_source: str
    rules: TopologyRules | None
    no_slices: str
    matrix_products: tuple[MatrixProducts, ...]
    matrix_source: str
    peak_tflops: Mapping[PeakName, Figure]
    measured: Mapping[str, Figure]
    hbm_bytes: Figure
    hbm_usable_bytes: Figure
    hbm_gbps: Figure
    ici_link_gbps: Figure
    ici_link_effective_gbps: Figure
    dcn_gbps: Figure
    pcie_gbps: Figure
    vmem_bytes: Figure
    smem_bytes: Figure
    cmem_bytes: Figure
    sublanes: Figure
    lanes: Figure
    mxus_per_core: Figure
    mxu_size: Figure
    sparse_cores: Figure
    clock_ghz: Figure
    host_ram_bytes: Figure

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Chip) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"get_chip({self.name!r})"

    @property
    def torus_dims(self) -> int | None:
        """Axes of the torus that joins the chips; None when no slice of it can be named."""
        return self.rules.dims if self.rules else None

    @property
    def counted_per_chip(self) -> int:
        """What one chip adds to the number in a slice's name."""
        return self.cores_per_chip if self.name_counts == "cores" else 1

    @property
    def cores_per_device(self) -> int:
        """TensorCores of one JAX device (2 where two cores work as one, "megacore")."""
        return self.cores_per_chip // self.devices_per_chip

    def peak(self, dtype: str | NumberFormat = "bf16") -> Figure:
        """Peak TFLOP/s of the chip for a number format, under any of its usual names.

        Raises:
            TPUValidationError: There is no such format.
            SliceError: No data sheet has a rate for it.
        """
        wanted = parse_format(dtype)
        if wanted.peak is None:
            raise SliceError(
                f"Data sheets give no peak for {wanted}; they do for {', '.join(PEAKS)}."
            )
        return self.peak_tflops[wanted.peak]

    def multiplies(
        self, dtype: str | NumberFormat, weights: str | NumberFormat | None = None
    ) -> bool:
        """Whether the matrix unit multiplies a format as it is: with itself, or with weights.

        Others are widened first, and their products are no faster than those of bfloat16.
        """
        left = parse_format(dtype).name
        right = left if weights is None else parse_format(weights).name
        return any(left in pair.left and right in pair.right for pair in self.matrix_products)

    def per_device(self, figure: Figure) -> Figure:
        """One JAX device's share of a figure of the chip."""
        return figure.scaled(1 / self.devices_per_chip)

    @property
    def host_ram_per_chip(self) -> Figure:
        """A chip's share of its host's memory."""
        return self.host_ram_bytes.scaled(1 / (self.chips_per_host or 1))

    def figures(self) -> dict[str, Figure]:
        """Every figure by name, peaks and measurements included."""
        named = {f"peak_{dtype}_tflops": peak for dtype, peak in self.peak_tflops.items()}
        own = ((field.name, getattr(self, field.name)) for field in fields(self))
        named.update((name, value) for name, value in own if isinstance(value, Figure))
        named.update((f"measured_{name}", figure) for name, figure in self.measured.items())
        return named

    def to_dict(self) -> dict[str, Any]:
        """Names, structure and every figure with its provenance."""
        return {
            "name": self.name,
            "title": self.title,
            "device_kinds": list(self.device_kinds),
            "api_prefix": self.api_prefix,
            "gke_accelerator": self.gke_accelerator,
            "gke_machine_types": list(self.gke_machine_types),
            "needs_gke": self.needs_gke,
            "cores_per_chip": self.cores_per_chip,
            "devices_per_chip": self.devices_per_chip,
            "chips_per_host": self.chips_per_host,
            "ici_links_per_chip": self.ici_links_per_chip,
            "interconnect": self.interconnect,
            "torus_dims": self.torus_dims,
            "pod_chips": self.pod_chips,
            "no_slices": self.no_slices,
            "structure_source": self.structure_source,
            "topology_source": self.topology_source,
            "matrix_products": [pair.to_dict() for pair in self.matrix_products],
            "matrix_source": self.matrix_source,
            "figures": {name: figure.to_dict() for name, figure in self.figures().items()},
        }

    def __rich__(self) -> Any:
        from .tables import chip_table

        return chip_table(self)

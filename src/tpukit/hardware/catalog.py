"""TPU generations: one TOML file per chip under `data/chips`, read, checked and found by any name.

A new generation is one more file there. `TPUKIT_CHIPS` names a folder with further files, for chips
that this release does not know.
"""

import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cache
from importlib.resources import files
from pathlib import Path

from ..errors import ConfigError, SliceError, did_you_mean
from ..plain_data import JsonMapping, JsonObject
from ..shown import Facts, Renderable, Shown
from .figure import Figure, find_source
from .formats import PEAKS, NumberFormat, PeakName, parse_format
from .topology import CubeRules, TopologyRules, parse_shape

CHIPS_VARIABLE = "TPUKIT_CHIPS"
GIB = 2**30
# Generations that are assumed where none is named: the slowest memory among the chips that kernels
# are tuned for, and the chip that most sizing questions are about.
CHIP_FOR_KERNEL_BLOCKS = "v5e"
CHIP_FOR_ESTIMATES = "v6e"
# Any slice that every supported libtpu compiles for; libtpu wants to be told one on start.
SLICE_FOR_LIBTPU = "v6e-4"
EDGE = (
    " Edge TPUs (Coral) run TensorFlow Lite models that their own compiler quantizes. Neither "
    "libtpu nor jax supports them, so they are not in the catalog."
)

_FIGURES = {
    "hbm_bytes": "B",
    "hbm_usable_gib_per_device": "GiB",
    "hbm_gbps": "GB/s",
    "ici_link_gbps": "GB/s",
    "ici_link_effective_gbps": "GB/s",
    "dcn_gbps": "GB/s",
    "pcie_gbps": "GB/s",
    "vmem_bytes": "B",
    "smem_bytes": "B",
    "cmem_bytes": "B",
    "sublanes": "",
    "lanes": "",
    "mxus_per_core": "",
    "mxu_size": "",
    "sparse_cores": "",
    "clock_ghz": "GHz",
    "host_ram_bytes": "B",
}
_PLAIN = (
    *("name", "title", "generation", "slice_prefix", "name_counts", "structure_source"),
    *("cores_per_chip", "devices_per_chip", "chips_per_host", "ici_links_per_chip"),
    *("api_prefix", "gke_accelerator", "needs_gke", "libtpu_name", "libtpu_chip_config"),
    *("tpu_api_type", "tpu_api_image", "gce_image_family", "gce_boot_disk", "wants_huge_pages"),
)


@dataclass(frozen=True, slots=True)
class MatrixProducts(Facts):
    """Formats that a matrix unit multiplies without widening: any of `left` by any of `right`.

    The right operand is the one that stays in the unit, such as a model's weights.
    """

    left: tuple[str, ...]
    right: tuple[str, ...]

    def __str__(self) -> str:
        if set(self.left) == set(self.right):
            return " · ".join(self.left)
        return f"{' · '.join(self.left)} with {' · '.join(self.right)}"


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Chip(Shown):
    """One TPU generation. Rates in `gbps` are gigabytes (10^9 bytes) per second.

    Attributes:
        name: Short name, for example "v5e" or "7x".
        device_kinds: Values of `jax.Device.device_kind` on this generation.
        pci_device_ids: PCI device ids under Linux, as jax lists them.
        name_counts: What the number in a slice's name counts: "cores", "chips", or "shape" when
            slices are named by their shape because the number is ambiguous.
        tpu_api_type: `AcceleratorConfig.Type` of the Cloud TPU API; None where that API does not
            offer the generation.
        tpu_api_image: VM image that Google recommends for jax on that API.
        gce_image_family: Image family for hosts on Compute Engine; None where Compute Engine makes
            no slices of the generation.
        gce_boot_disk: Boot disk type for those hosts.
        wants_huge_pages: Whether the TPU runtime maps memory in transparent huge pages.
        considered_for: Searches that include the generation by default: "training" (`plan`) and
            "published_checkpoints" (the verdict on quantized checkpoints).
        cores_per_chip: TensorCores per chip.
        devices_per_chip: JAX devices per chip; each has an equal share of its memory and peak.
        chips_per_host: In multi-host slices; None when not known.
        libtpu_name: The offline compiler's name for it; None when libtpu does not support it.
        interconnect: "2D torus", "3D torus" or "Boardfly".
        rules: Legal slice shapes; None when no slice has a public name.
        no_slices: Why no slice has a public name; "" where there are rules.
        peak_tflops: Peak per chip by type: bf16, fp8, int8, int4.
        matrix_products: Pairs of formats that the matrix unit multiplies without widening them.
        hbm_usable_bytes: HBM per chip that the compiler lets programs use.
        ici_link_gbps: One link in one direction, as the vendor states it.
        ici_link_effective_gbps: One link in one direction, as step-time models count it.
        dcn_gbps: Data-centre network bandwidth per chip.
        pcie_gbps: Achieved transfer rate between host and chip, in each direction.
        host_ram_bytes: RAM of a host with `chips_per_host` chips.
        vmem_bytes: Per core, like `smem_bytes` and `mxus_per_core`.
        cmem_bytes: Per chip.
        sublanes: Rows of one vector register; each row has `lanes` 32-bit values.
        mxu_size: Edge of the square matrix unit.
        measured: Published microbenchmarks, which bound what a prediction may claim.
        kernels: Sizes and limits that Pallas kernels choose by, for example `scoped_vmem_bytes`.
        fitted_rates: Values that replace the defaults of `rates.toml`, by section and name.
        list_prices: List prices in the form of `prices.json`, for a chip that it does not have.
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
    tpu_api_type: str | None
    tpu_api_image: str | None
    gce_image_family: str | None
    gce_boot_disk: str | None
    wants_huge_pages: bool
    considered_for: tuple[str, ...]
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
    kernels: Mapping[str, Figure]
    fitted_rates: JsonMapping
    list_prices: JsonMapping
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
    _facts = (
        "name title device_kinds api_prefix gke_accelerator gke_machine_types needs_gke "
        "cores_per_chip devices_per_chip chips_per_host ici_links_per_chip interconnect "
        "torus_dims pod_chips no_slices structure_source topology_source matrix_products "
        "matrix_source"
    )

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
        """Number of torus axes; None when no slice has a public name."""
        return self.rules.dims if self.rules else None

    @property
    def counted_per_chip(self) -> int:
        """How much one chip adds to the number in a slice's name."""
        return self.cores_per_chip if self.name_counts == "cores" else 1

    @property
    def cores_per_device(self) -> int:
        """TensorCores per JAX device (2 for "megacore" chips, whose two cores act as one)."""
        return self.cores_per_chip // self.devices_per_chip

    def peak(self, dtype: str | NumberFormat = "bf16") -> Figure:
        """Return the chip's peak TFLOP/s for a number format, given by any of its usual names.

        Raises:
            TPUValidationError: There is no such format.
            SliceError: Data sheets state no peak for the format.
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
        """Whether the matrix unit multiplies a format natively, by itself or by `weights`.

        Formats without native support are widened first, so their matmuls are no faster than
        those of bfloat16.
        """
        left = parse_format(dtype).name
        right = left if weights is None else parse_format(weights).name
        return any(left in pair.left and right in pair.right for pair in self.matrix_products)

    def per_device(self, figure: Figure) -> Figure:
        """Return one JAX device's share of a per-chip figure."""
        return figure.scaled(1 / self.devices_per_chip)

    @property
    def host_ram_per_chip(self) -> Figure:
        """Host RAM divided by the chips of a host."""
        return self.host_ram_bytes.scaled(1 / (self.chips_per_host or 1))

    def figures(self) -> dict[str, Figure]:
        """Return every figure by name, including peaks, measurements and kernel settings."""
        named = {f"peak_{dtype}_tflops": peak for dtype, peak in self.peak_tflops.items()}
        own = ((field.name, getattr(self, field.name)) for field in fields(self))
        named.update((name, value) for name, value in own if isinstance(value, Figure))
        named.update((f"measured_{name}", figure) for name, figure in self.measured.items())
        named.update((f"kernel_{name}", figure) for name, figure in self.kernels.items())
        return named

    def to_dict(self) -> JsonObject:
        """Return names, structure and every figure with its provenance."""
        return {
            **super().to_dict(),
            "figures": {name: figure.to_dict() for name, figure in self.figures().items()},
        }

    def __rich__(self) -> Renderable:
        from .tables import chip_table

        return chip_table(self)


def list_chips() -> tuple[Chip, ...]:
    """Return every generation in the catalog, oldest first."""
    return tuple(_chips().values())


def generation_names() -> tuple[str, ...]:
    """Return the name of every generation, oldest first."""
    return tuple(_chips())


def chips_considered_for(search: str) -> tuple[str, ...]:
    """Return the names of the generations that a search includes by default."""
    return tuple(chip.name for chip in list_chips() if search in chip.considered_for)


def get_chip(name: str) -> Chip:
    """Return the generation with a name such as "v5e", "v5litepod", "TPU v5 lite" or "trillium".

    Raises:
        SliceError: There is no such generation; the message names the nearest one.
    """
    wanted = normalise_name(name)
    known = chips_by_spelling()
    for spelling in (wanted, wanted.removeprefix("tpu-"), wanted.removeprefix("tpu")):
        if spelling in known:
            return known[spelling]
    raise SliceError(
        f"{name!r} is not a TPU generation; known are {', '.join(generation_names())}."
        + (edge_sentence(wanted) or did_you_mean(wanted.removeprefix("tpu-"), known))
    )


def edge_sentence(name: str) -> str:
    """Return the explanation for a name that means an edge TPU; "" for any other name."""
    return EDGE if {"edge", "coral", "edgetpu"} & {*normalise_name(name).split("-")} else ""


def dcn_rate(chip: Chip) -> Figure:
    """Return the data-centre network rate per chip, or the slowest published one if unknown.

    Without a rate, an exchange over this network would count as taking no time.
    """
    if chip.dcn_gbps.value is not None:
        return chip.dcn_gbps
    known = [other for other in list_chips() if other.dcn_gbps.value is not None]
    slowest = min(known, key=lambda other: other.dcn_gbps.value or 0.0)
    bound = f"{chip.name}: {chip.dcn_gbps.reason.rstrip('.')}; {slowest.name}'s, the slowest known"
    return Figure(slowest.dcn_gbps.value, slowest.dcn_gbps.unit, "model", bound)


def normalise_name(name: str) -> str:
    """Normalise a name to lower case, with `-` for every separator."""
    parts = "".join(char if char.isalnum() else " " for char in name.lower()).split()
    return "-".join(parts)


@cache
def chips_by_spelling() -> dict[str, Chip]:
    """Return each generation by every spelling of its name."""
    names: dict[str, Chip] = {}
    for chip in list_chips():
        kinds = (kind.lower().removeprefix("tpu") for kind in chip.device_kinds)
        own = (chip.name, chip.slice_prefix, *chip.aliases, *chip.shape_only_aliases, *kinds)
        names.update((normalise_name(name), chip) for name in own)
    return names


@cache
def _chips() -> dict[str, Chip]:
    """Return the generations by name, oldest first."""
    shipped = (files("tpukit.hardware") / "data" / "chips").iterdir()
    texts = [(file.name, file.read_text("utf-8")) for file in shipped]
    if folder := os.environ.get(CHIPS_VARIABLE):
        if not Path(folder).is_dir():
            raise ConfigError(
                f"{CHIPS_VARIABLE} is {folder!r}, which is no folder; name a folder with chip "
                "files, or unset the variable."
            )
        texts += [(str(path), path.read_text("utf-8")) for path in Path(folder).glob("*.toml")]
    chips = [read_chip(text, where) for where, text in texts]
    return {
        chip.name: chip for chip in sorted(chips, key=lambda chip: (chip.generation, chip.name))
    }


def read_chip(text: str, where: str) -> Chip:
    """Read a chip from the text of its data file.

    Raises:
        ConfigError: The text is not TOML, or a key is missing.
        SliceError: A figure is missing or unknown.
        TPUValidationError: A figure cites a source the file does not describe.
    """
    try:
        return chip_from(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"The chip file {where} is not valid TOML: {error}.") from None
    except KeyError as error:
        raise ConfigError(
            f"The chip file {where} lacks {error.args[0]!r}; copy the keys of a chip in "
            "hardware/data/chips."
        ) from None


def chip_from(data: JsonMapping) -> Chip:
    """Build a chip from the parsed content of its data file.

    Raises:
        KeyError: A key is missing.
        SliceError: A figure is missing or unknown.
        TPUValidationError: A figure cites a source the file does not describe.
    """
    sources = data["sources"]

    def figure(entry: JsonMapping, unit: str) -> Figure:
        return Figure.cited(entry, unit, sources)

    def with_units(section: str) -> dict[str, Figure]:
        return {key: figure(entry, entry["unit"]) for key, entry in data.get(section, {}).items()}

    unexpected = set(_FIGURES) ^ set(data["figures"])
    if unexpected:
        raise SliceError(
            f"The data file of {data['name']} must have exactly the catalog's figures; "
            f"missing or unknown: {', '.join(sorted(unexpected))}."
        )
    figures: JsonObject = {
        key: figure(data["figures"][key], unit) for key, unit in _FIGURES.items()
    }
    usable_of_device: Figure = figures.pop("hbm_usable_gib_per_device")
    topology, matrix = data["topology"], data["matrix_unit"]
    plain: JsonObject = {key: data.get(key) for key in _PLAIN}
    return Chip(
        **plain,
        **figures,
        aliases=tuple(data["aliases"]),
        shape_only_aliases=tuple(data["shape_only_aliases"]),
        device_kinds=tuple(data["device_kinds"]),
        pci_device_ids=tuple(data["pci_device_ids"]),
        gke_machine_types=tuple(data.get("gke_machine_types", ())),
        considered_for=tuple(data["considered_for"]),
        interconnect=topology["interconnect"],
        pod_chips=topology["pod_chips"],
        topology_source=topology["source"],
        rules=None if "no_slices" in topology else _rules_from(topology),
        no_slices=topology.get("no_slices", ""),
        matrix_products=tuple(
            MatrixProducts(_formats(pair["left"]), _formats(pair["right"]))
            for pair in matrix["products"]
        ),
        matrix_source=f"{find_source(matrix['source'], sources)['title']}; {matrix['note']}",
        peak_tflops={name: figure(data["peak_tflops"][name], "TFLOP/s") for name in PEAKS},
        measured=with_units("measured"),
        kernels=with_units("kernels"),
        fitted_rates=data.get("rates", {}),
        list_prices=data.get("prices", {}),
        hbm_usable_bytes=usable_of_device.scaled(GIB * data["devices_per_chip"], unit="B"),
    )


def _formats(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(parse_format(name).name for name in names)


def _rules_from(topology: JsonMapping) -> TopologyRules:
    x, y, z = topology["host_bounds"]
    cubes = topology.get("cubes")
    return TopologyRules(
        dims=topology["dims"],
        listed_shapes=tuple(parse_shape(shape) for shape in topology["listed_shapes"]),
        cubes=CubeRules(**cubes) if cubes else None,
        wrap_length=topology.get("wrap_length"),
        host_bounds=(x, y, z),
        single_host_shapes=tuple(parse_shape(shape) for shape in topology["single_host_shapes"]),
    )

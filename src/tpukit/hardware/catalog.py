"""The catalog: generations read from `data/*.toml`, checked, cached, and found by any name."""

import tomllib
from collections.abc import Iterable, Mapping
from functools import cache
from importlib import resources
from typing import Any

from ..errors import SliceError, did_you_mean
from .chip import Chip, MatrixProducts
from .figure import Figure, find_source
from .formats import PEAKS, parse_format
from .topology import CubeRules, TopologyRules, parse_shape

GENERATIONS = ("v2", "v3", "v4", "v5e", "v5p", "v6e", "7x", "8i", "8t")
GIB = 2**30
EDGE = (
    " Edge TPUs (Coral) run TensorFlow Lite models that their own compiler quantizes; neither "
    "libtpu nor jax knows them, and there is no catalog row."
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
)


def list_chips() -> tuple[Chip, ...]:
    """Every generation in the catalog, oldest first."""
    return tuple(_load(name) for name in GENERATIONS)


def get_chip(name: str) -> Chip:
    """The generation of that name: "v5e", "v5litepod", "TPU v5 lite", "trillium", "tpu7x".

    Raises:
        SliceError: No such generation; the message names the nearest.
    """
    wanted = spelled(name)
    known = names_of_chips()
    for spelling in (wanted, wanted.removeprefix("tpu-"), wanted.removeprefix("tpu")):
        if spelling in known:
            return known[spelling]
    raise SliceError(
        f"{name!r} is not a TPU generation; known are {', '.join(GENERATIONS)}."
        + (edge_sentence(wanted) or did_you_mean(wanted.removeprefix("tpu-"), known))
    )


def edge_sentence(name: str) -> str:
    """What to say of a name that means a TPU for the edge; nothing of any other."""
    return EDGE if {"edge", "coral", "edgetpu"} & {*spelled(name).split("-")} else ""


def dcn_rate(chip: Chip) -> Figure:
    """What the data-centre network carries for a chip; the slowest published where it is not known.

    No rate would count as an exchange that takes no time.
    """
    if chip.dcn_gbps.value is not None:
        return chip.dcn_gbps
    known = [one for one in list_chips() if one.dcn_gbps.value is not None]
    slowest = min(known, key=lambda one: one.dcn_gbps.value or 0.0)
    bound = f"{chip.name}: {chip.dcn_gbps.reason.rstrip('.')}; {slowest.name}'s, the slowest known"
    return Figure(slowest.dcn_gbps.value, slowest.dcn_gbps.unit, "model", bound)


def spelled(name: str) -> str:
    """One spelling of a name: lower case, with `-` for every separator people use."""
    parts = "".join(char if char.isalnum() else " " for char in name.lower()).split()
    return "-".join(parts)


@cache
def names_of_chips() -> dict[str, Chip]:
    """Every spelling of every generation."""
    names: dict[str, Chip] = {}
    for chip in list_chips():
        kinds = (kind.lower().removeprefix("tpu") for kind in chip.device_kinds)
        own = (chip.name, chip.slice_prefix, *chip.aliases, *chip.shape_only_aliases, *kinds)
        names.update((spelled(name), chip) for name in own)
    return names


@cache
def _load(name: str) -> Chip:
    file = resources.files("tpukit.hardware") / "data" / f"{name}.toml"
    return chip_from(tomllib.loads(file.read_text("utf-8")))


def chip_from(data: Mapping[str, Any]) -> Chip:
    """Build a chip from the content of a data file, refusing one that is incomplete.

    Raises:
        SliceError: A figure is missing or unknown.
        TPUValidationError: A figure cites a source the file does not describe.
    """
    sources = data["sources"]

    def figure(entry: Mapping[str, Any], unit: str) -> Figure:
        return Figure.cited(entry, unit, sources)

    unexpected = set(_FIGURES) ^ set(data["figures"])
    if unexpected:
        raise SliceError(
            f"The data file of {data['name']} must hold exactly the catalog's figures; "
            f"missing or unknown: {', '.join(sorted(unexpected))}."
        )
    figures: dict[str, Any] = {
        key: figure(data["figures"][key], unit) for key, unit in _FIGURES.items()
    }
    usable_of_device: Figure = figures.pop("hbm_usable_gib_per_device")
    topology, matrix = data["topology"], data["matrix_unit"]
    plain: dict[str, Any] = {key: data.get(key) for key in _PLAIN}
    return Chip(
        **plain,
        **figures,
        aliases=tuple(data["aliases"]),
        shape_only_aliases=tuple(data["shape_only_aliases"]),
        device_kinds=tuple(data["device_kinds"]),
        pci_device_ids=tuple(data["pci_device_ids"]),
        gke_machine_types=tuple(data.get("gke_machine_types", ())),
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
        measured={
            key: figure(entry, entry["unit"]) for key, entry in data.get("measured", {}).items()
        },
        hbm_usable_bytes=usable_of_device.scaled(GIB * data["devices_per_chip"], unit="B"),
    )


def _formats(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(parse_format(name).name for name in names)


def _rules_from(topology: Mapping[str, Any]) -> TopologyRules:
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

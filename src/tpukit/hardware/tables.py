"""How chips, slices and prices look in a terminal; rich is imported only to show something."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from .chip import Chip
from .figure import Figure
from .formats import PEAKS
from .topology import format_shape

if TYPE_CHECKING:
    from rich.table import Table

    from .slice import Slice


def slice_table(of: "Slice") -> "Table":
    """One slice in full, a row for each fact."""
    table = facts_table(f"{of}  {of.chip.title}")
    several = f" x {of.num_slices} slices" if of.num_slices > 1 else ""
    rings = [axis for axis, wrapped in zip("xyz", of.wraps, strict=False) if wrapped]
    table.add_row("topology", format_shape(of.topology) + several, "")
    table.add_row("wraps", ", ".join(rings) or "no axis", "")
    table.add_row("chips", f"{of.chips:,}", "")
    table.add_row("hosts", f"{of.hosts:,}", f"{of.chips_per_host} chips each")
    table.add_row("JAX devices", f"{of.devices:,}", f"{of.devices_per_host} on each host")
    for dtype in PEAKS:
        add_figure(table, f"peak {dtype}", of.peak_tflops(dtype))
    add_figure(table, "HBM", of.hbm_bytes)
    add_figure(table, "HBM usable", of.hbm_usable_bytes)
    add_figure(table, "HBM usable a device", of.chip.per_device(of.chip.hbm_usable_bytes))
    add_figure(table, "HBM bandwidth a chip", of.chip.hbm_gbps)
    add_figure(table, "ICI bisection of a slice", of.bisection_gbps)
    add_figure(table, "DCN of a slice", of.dcn_gbps)
    add_figure(table, "memory of a host", of.host_ram_bytes)
    table.add_row("Cloud TPU API", of.api_name or "– (GKE only)", "")
    table.add_row("GKE", of.gke_accelerator or "–", f"topology {of.gke_topology}")
    table.add_row("offline compiler", of.libtpu_topology, _options(of.libtpu_options))
    return table


def chip_table(chip: Chip) -> "Table":
    """Every figure of one generation with its source."""
    table = facts_table(f"{chip.name}  {chip.title}")
    table.add_row("TensorCores a chip", str(chip.cores_per_chip), chip.structure_source)
    table.add_row("JAX devices a chip", str(chip.devices_per_chip), chip.structure_source)
    pod = f"{chip.interconnect}, up to {chip.pod_chips:,} chips"
    table.add_row("interconnect", pod, chip.topology_source)
    if chip.no_slices:
        table.add_row("slices", "–", chip.no_slices)
    products = "\n".join(str(pair) for pair in chip.matrix_products)
    table.add_row("matrix unit multiplies", products, chip.matrix_source)
    for name, figure in chip.figures().items():
        add_figure(table, name.replace("_", " "), figure, with_note=True)
    return table


def facts_table(title: str) -> "Table":
    """An empty table of facts: what, how much, from where."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(justify="right")
    table.add_column(style="dim", overflow="fold")
    return table


def add_figure(table: "Table", label: str, figure: Figure, *, with_note: bool = False) -> None:
    """A row with a figure and where it came from, or why it is missing."""
    if figure.value is None:
        table.add_row(label, "–", figure.reason)
        return
    note = f"; {figure.note}" if figure.note and with_note else ""
    table.add_row(label, figure.text, f"{figure.origin}: {figure.source}{note}")


def listing_table(title: str, columns: Iterable[str]) -> "Table":
    """An empty table with a header: text in the first column, numbers in the others."""
    from rich.table import Table

    table = Table(
        title=title,
        title_justify="left",
        caption_justify="left",
        box=None,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        header_style="bold",
    )
    for position, column in enumerate(columns):
        table.add_column(column, justify="left" if position == 0 else "right", no_wrap=True)
    return table


def _options(options: dict[str, object]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())

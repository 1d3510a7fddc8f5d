"""Terminal tables of chips, slices and prices; rich is imported only to show something."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ..plain_data import JsonObject
from ..shown import Renderable, Shown
from .catalog import Chip, list_chips
from .figure import Figure
from .formats import PEAKS
from .prices import PriceBook, Rate
from .slice import Slice, list_slices
from .topology import format_shape

if TYPE_CHECKING:
    from rich.table import Table


def slice_table(target: Slice) -> "Table":
    """Return a table of one slice, with a row per fact."""
    table = facts_table(f"{target}  {target.chip.title}")
    several = f" x {target.num_slices} slices" if target.num_slices > 1 else ""
    rings = [axis for axis, wrapped in zip("xyz", target.wraps, strict=False) if wrapped]
    table.add_row("topology", format_shape(target.topology) + several, "")
    table.add_row("wraps", ", ".join(rings) or "no axis", "")
    table.add_row("chips", f"{target.chips:,}", "")
    table.add_row("hosts", f"{target.hosts:,}", f"{target.chips_per_host} chips each")
    table.add_row("JAX devices", f"{target.devices:,}", f"{target.devices_per_host} on each host")
    for dtype in PEAKS:
        add_figure(table, f"peak {dtype}", target.peak_tflops(dtype))
    add_figure(table, "HBM", target.hbm_bytes)
    add_figure(table, "HBM usable", target.hbm_usable_bytes)
    add_figure(table, "HBM usable per device", target.chip.per_device(target.chip.hbm_usable_bytes))
    add_figure(table, "HBM bandwidth per chip", target.chip.hbm_gbps)
    add_figure(table, "ICI bisection of a slice", target.bisection_gbps)
    add_figure(table, "DCN of a slice", target.dcn_gbps)
    add_figure(table, "memory of a host", target.host_ram_bytes)
    table.add_row("Cloud TPU API", target.api_name or "– (GKE only)", "")
    table.add_row("GKE", target.gke_accelerator or "–", f"topology {target.gke_topology}")
    table.add_row("offline compiler", target.libtpu_topology, _options(target.libtpu_options))
    return table


def chip_table(chip: Chip) -> "Table":
    """Return a table of one generation, with the source of every figure."""
    table = facts_table(f"{chip.name}  {chip.title}")
    table.add_row("TensorCores per chip", str(chip.cores_per_chip), chip.structure_source)
    table.add_row("JAX devices per chip", str(chip.devices_per_chip), chip.structure_source)
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
    """Return an empty table with columns for a fact's name, value and source."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(justify="right")
    table.add_column(style="dim", overflow="fold")
    return table


def add_figure(table: "Table", label: str, figure: Figure, *, with_note: bool = False) -> None:
    """Add a row with a figure and its source, or the reason why it is missing."""
    if figure.value is None:
        table.add_row(label, "–", figure.reason)
        return
    note = f"; {figure.note}" if figure.note and with_note else ""
    table.add_row(label, figure.text, f"{figure.origin}: {figure.source}{note}")


def listing_table(title: str, columns: Iterable[str]) -> "Table":
    """Return an empty table with a header: text in the first column, numbers in the others."""
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


@dataclass(frozen=True)
class GenerationListing(Shown):
    """All generations, one line per generation."""

    chips: tuple[Chip, ...]
    book: PriceBook
    _facts = "generations=chips"

    @classmethod
    def of(cls, book: PriceBook) -> "GenerationListing":
        """List all generations of the catalog, with prices from `book`."""
        return cls(list_chips(), book)

    def __rich__(self) -> Renderable:
        columns = (
            *(
                "name",
                "bf16\nTFLOP/s",
                "int8\nTOP/s",
                "HBM",
                "usable\nHBM",
                "HBM\nGB/s",
                "cores",
                "JAX\ndevices",
            ),
            *("chips of\na slice", "USD a\nchip-h"),
        )
        table = listing_table("TPU generations (of one chip)", columns)
        for chip in self.chips:
            sizes = sorted(chip.rules.by_chips) if chip.rules else []
            rates = self.book.find(chip.name, tier="on_demand")
            cheapest = min((rate.price.value for rate in rates if rate.price.value), default=None)
            table.add_row(
                chip.name,
                _number(chip.peak().value),
                _number(chip.peak("int8").value),
                chip.hbm_bytes.text,
                chip.hbm_usable_bytes.text,
                _number(chip.hbm_gbps.value),
                str(chip.cores_per_chip),
                str(chip.devices_per_chip),
                f"{sizes[0]}–{sizes[-1]:,}" if sizes else "–",
                _number(cheapest, decimals=4),
            )
        table.caption = (
            "Peaks and bandwidths are datasheet figures, usable HBM is the compiler's, "
            "prices are on demand in the cheapest region; "
            "`tpukit slices v6e --json` gives the source of each."
        )
        return table


@dataclass(frozen=True)
class SliceListing(Shown):
    """The slices of one generation, one line per slice.

    Attributes:
        largest: The largest model that each slice trains, by the slice's name.
        assumed: Description of how that model is trained.
    """

    slices: tuple[Slice, ...]
    book: PriceBook
    largest: Mapping[str, str | None] = field(default_factory=dict[str, str | None])
    assumed: str = ""

    @classmethod
    def of(
        cls,
        generation: str,
        book: PriceBook,
        *,
        largest: Callable[[Slice], str | None] | None = None,
        assumed: str = "",
    ) -> "SliceListing":
        """List the slices of a generation in their default shapes, with prices from `book`.

        Args:
            generation: Name of the generation.
            book: Prices.
            largest: Returns the name of the largest model that a slice trains.
            assumed: Description of how that model is trained.
        """
        found = list_slices(generation)
        named = {} if largest is None else {str(target): largest(target) for target in found}
        return cls(found, book, named, assumed)

    def usd_per_pflop_hour(self, target: Slice) -> Figure:
        """Return the price of one hour at a bf16 peak of 1 PFLOP/s, on demand, cheapest region."""
        price, peak = self.book.cost_per_hour(target), target.peak_tflops()
        if price.value is None or peak.value is None:
            return Figure.missing("USD", price.reason or peak.reason)
        return Figure.derived(price.value / (peak.value / 1e3), "USD", inputs=(price, peak))

    def to_dict(self) -> JsonObject:
        """Return the generation, and every slice with its price."""
        return {
            "generation": self.slices[0].chip.to_dict(),
            "slices": [
                {
                    **target.to_dict(),
                    "int8_tops": target.peak_tflops("int8").to_dict(),
                    "usd_per_hour": self.book.cost_per_hour(target).to_dict(),
                    "usd_per_pflop_hour": self.usd_per_pflop_hour(target).to_dict(),
                    "largest_trained": self.largest.get(str(target)),
                    "cheapest_region": self.book.cheapest_region(target),
                }
                for target in self.slices
            ],
        }

    def __rich__(self) -> Renderable:
        from rich.console import Group
        from rich.text import Text

        chip = self.slices[0].chip
        several = "s" if chip.devices_per_chip > 1 else ""
        named_by_shape = str(self.slices[0]).endswith(format_shape(self.slices[0].topology))
        table = listing_table(
            f"{chip.title}, {chip.devices_per_chip} JAX device{several} a chip",
            (
                *("slice", *(() if named_by_shape else ("shape",)), "chips", "hosts"),
                *("bf16\nTFLOP/s", "int8\nTOP/s", "usable\nHBM", "USD/h", "spot\nUSD/h"),
                "USD a\nPFLOP\n-hour",
            ),
        )
        for target in self.slices:
            table.add_row(
                str(target),
                *(() if named_by_shape else (format_shape(target.topology),)),
                f"{target.chips:,}",
                f"{target.hosts:,}",
                _number(target.peak_tflops().value),
                _number(target.peak_tflops("int8").value),
                target.hbm_usable_bytes.text,
                _price(self.book.cost_per_hour(target).value),
                _price(self.book.cost_per_hour(target, tier="spot").value),
                _price(self.usd_per_pflop_hour(target).value),
            )
        quote = self.book.quote(self.slices[0])
        table.caption = (
            f"USD on demand in the cheapest region; a PFLOP-hour is one at the bf16 peak; "
            f"{quote.source}, {quote.date}."
            if quote.value
            else quote.reason
        )
        if not self.largest:
            return table
        how = f"Largest preset that each slice trains (model): {self.assumed}."
        return Group(table, "", Text(how), self._trained())

    def _trained(self) -> "Table":
        """Return a table of the smallest slice for each model in `largest`."""
        table = listing_table("", ("from", "preset"))
        last: str | None = None
        for target in self.slices:
            name = self.largest.get(str(target))
            if name is not None and name != last:
                table.add_row(str(target), name)
                last = name
        return table


@dataclass(frozen=True)
class PriceListing(Shown):
    """Rates, one line per region and tier."""

    rates: tuple[Rate, ...]
    reason: str = ""

    def to_dict(self) -> JsonObject:
        """Return the rates, or the reason why there are none."""
        shown: JsonObject = {"rates": [rate.to_dict() for rate in self.rates]}
        return {**shown, "reason": self.reason} if self.reason else shown

    def __rich__(self) -> Renderable:
        columns = ("generation", "region", "tier", "slices", "USD/chip-h", "date")
        table = listing_table("Prices", columns)
        for rate in self.rates:
            table.add_row(
                rate.generation,
                rate.region,
                rate.tier,
                _sizes(rate),
                _usd(rate),
                rate.price.date or "–",
            )
        sources = dict.fromkeys(rate.price.source for rate in self.rates)
        table.caption = self.reason or "; ".join(sources)
        return table


def _sizes(rate: Rate) -> str:
    if rate.max_chips is not None:
        return f"up to {rate.max_chips} chips"
    return f"from {rate.min_chips} chips" if rate.min_chips > 1 else "all"


def _usd(rate: Rate) -> str:
    return _number(rate.price.value, decimals=4)


def _price(value: float | None) -> str:
    """Format a price, with cents below 1,000."""
    return _number(value, decimals=0 if value is not None and value >= 1000 else 2)


def _number(value: float | None, *, decimals: int = 0) -> str:
    return "–" if value is None else f"{value:,.{decimals}f}"

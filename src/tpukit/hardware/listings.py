"""Lists of generations, slices and prices that show themselves."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..shown import Shown
from .catalog import list_chips
from .chip import Chip
from .figure import Figure
from .prices import PriceBook, Rate
from .slice import Slice, list_slices
from .tables import listing_table
from .topology import format_shape


@dataclass(frozen=True)
class GenerationListing(Shown):
    """Every generation, a line each."""

    chips: tuple[Chip, ...]
    book: PriceBook

    @classmethod
    def of(cls, book: PriceBook) -> "GenerationListing":
        """All generations of the catalog, with prices from `book`."""
        return cls(list_chips(), book)

    def to_dict(self) -> dict[str, Any]:
        """Every generation with all of its figures."""
        return {"generations": [chip.to_dict() for chip in self.chips]}

    def __rich__(self) -> Any:
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
    """The slices of one generation, a line each.

    Attributes:
        largest: The largest model that each slice trains, by the slice's name.
        assumed: How it is trained.
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
        """The slices of one generation in their default shapes, with prices from `book`.

        Args:
            generation: Its name.
            book: Prices.
            largest: Names the largest model that a slice trains.
            assumed: How it is trained, in words.
        """
        found = list_slices(generation)
        named = {} if largest is None else {str(one): largest(one) for one in found}
        return cls(found, book, named, assumed)

    def usd_per_pflop_hour(self, one: Slice) -> Figure:
        """Price of an hour at one PFLOP/s of bf16 peak, on demand in the cheapest region."""
        price, peak = self.book.cost_per_hour(one), one.peak_tflops()
        if price.value is None or peak.value is None:
            return Figure.missing("USD", price.reason or peak.reason)
        return Figure.derived(price.value / (peak.value / 1e3), "USD", inputs=(price, peak))

    def to_dict(self) -> dict[str, Any]:
        """The generation, and every slice with its price."""
        return {
            "generation": self.slices[0].chip.to_dict(),
            "slices": [
                {
                    **one.to_dict(),
                    "int8_tops": one.peak_tflops("int8").to_dict(),
                    "usd_per_hour": self.book.cost_per_hour(one).to_dict(),
                    "usd_per_pflop_hour": self.usd_per_pflop_hour(one).to_dict(),
                    "largest_trained": self.largest.get(str(one)),
                    "cheapest_region": self.book.cheapest_region(one),
                }
                for one in self.slices
            ],
        }

    def __rich__(self) -> Any:
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
        for one in self.slices:
            table.add_row(
                str(one),
                *(() if named_by_shape else (format_shape(one.topology),)),
                f"{one.chips:,}",
                f"{one.hosts:,}",
                _number(one.peak_tflops().value),
                _number(one.peak_tflops("int8").value),
                one.hbm_usable_bytes.text,
                _price(self.book.cost_per_hour(one).value),
                _price(self.book.cost_per_hour(one, tier="spot").value),
                _price(self.usd_per_pflop_hour(one).value),
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

    def _trained(self) -> Any:
        """The smallest slice for each model that is the largest somewhere."""
        table = listing_table("", ("from", "preset"))
        last: str | None = None
        for one in self.slices:
            name = self.largest.get(str(one))
            if name is not None and name != last:
                table.add_row(str(one), name)
                last = name
        return table


@dataclass(frozen=True)
class PriceListing(Shown):
    """Rates, a line for each region and tier."""

    rates: tuple[Rate, ...]
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """The rates, and why there are none where there are none."""
        shown: dict[str, Any] = {"rates": [rate.to_dict() for rate in self.rates]}
        return {**shown, "reason": self.reason} if self.reason else shown

    def __rich__(self) -> Any:
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
    """Cents where they are more than a thousandth of it."""
    return _number(value, decimals=0 if value is not None and value >= 1000 else 2)


def _number(value: float | None, *, decimals: int = 0) -> str:
    return "–" if value is None else f"{value:,.{decimals}f}"

"""Lists of generations, slices and prices that show themselves."""

from dataclasses import dataclass
from typing import Any

from .catalog import list_chips
from .chip import Chip
from .prices import PriceBook, Rate
from .slice import Slice, list_slices
from .tables import listing_table
from .topology import format_shape


@dataclass(frozen=True)
class GenerationListing:
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
            *("name", "bf16\nTFLOP/s", "HBM", "usable\nHBM", "HBM\nGB/s", "cores", "JAX\ndevices"),
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
class SliceListing:
    """The slices of one generation, a line each."""

    slices: tuple[Slice, ...]
    book: PriceBook

    @classmethod
    def of(cls, generation: str, book: PriceBook) -> "SliceListing":
        """The slices of one generation in their default shapes, with prices from `book`."""
        return cls(list_slices(generation), book)

    def to_dict(self) -> dict[str, Any]:
        """The generation, and every slice with its price."""
        return {
            "generation": self.slices[0].chip.to_dict(),
            "slices": [
                {
                    **one.to_dict(),
                    "usd_per_hour": self.book.cost_per_hour(one).to_dict(),
                    "cheapest_region": self.book.cheapest_region(one),
                }
                for one in self.slices
            ],
        }

    def __rich__(self) -> Any:
        chip = self.slices[0].chip
        several = "s" if chip.devices_per_chip > 1 else ""
        table = listing_table(
            f"{chip.title}, {chip.devices_per_chip} JAX device{several} a chip",
            (
                *("slice", "shape", "chips", "hosts", "bf16\nTFLOP/s", "usable\nHBM"),
                *("USD/h\non demand", "USD/h\nspot"),
            ),
        )
        for one in self.slices:
            table.add_row(
                str(one),
                format_shape(one.topology),
                f"{one.chips:,}",
                f"{one.hosts:,}",
                _number(one.peak_tflops().value),
                one.hbm_usable_bytes.text,
                _number(self.book.cost_per_hour(one).value, decimals=2),
                _number(self.book.cost_per_hour(one, tier="spot").value, decimals=2),
            )
        quote = self.book.quote(self.slices[0])
        table.caption = (
            f"Cheapest region; {quote.source}, {quote.date}." if quote.value else quote.reason
        )
        return table


@dataclass(frozen=True)
class PriceListing:
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


def _number(value: float | None, *, decimals: int = 0) -> str:
    return "–" if value is None else f"{value:,.{decimals}f}"

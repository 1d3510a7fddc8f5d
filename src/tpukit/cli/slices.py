"""`tpukit slices`, `tpukit slice` and `tpukit prices`: the hardware catalog on the command line."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .job_options import Json
from .output import show

if TYPE_CHECKING:
    from ..hardware.prices import PriceBook

Rates = Annotated[
    Path | None, typer.Option("--rates", help="YAML file with your own prices.", dir_okay=False)
]


def slices(
    generation: Annotated[
        str | None, typer.Argument(help="Chip generation: v2 … v6e, 7x, 8i or 8t. [default: all]")
    ] = None,
    rates: Rates = None,
    json: Json = False,
) -> None:
    """List TPU generations, or the slices of one: size, peaks, memory, price, largest model.

    For a generation without public slices, list every figure of the chip with its source.
    """
    from ..hardware.catalog import get_chip
    from ..hardware.tables import GenerationListing

    book = _book(rates)
    if generation is None:
        show(GenerationListing.of(book), json=json)
    elif (chip := get_chip(generation)).rules is None:
        show(chip, json=json)
    else:
        from ..planner.memory_optimizer import list_slices

        show(list_slices(generation, book), json=json)


def slice_info(
    name: Annotated[
        str, typer.Argument(help="Name of a slice: v6e-64, v5p:4x4x8, tpu7x-4x4x4, 2xv6e-256, …")
    ],
    json: Json = False,
) -> None:
    """Show all figures of one slice with their sources."""
    from ..hardware.slice import Slice

    show(Slice.parse(name), json=json)


def prices(
    generation: Annotated[
        str | None, typer.Argument(help="Chip generation: v2 … v6e or 7x. [default: all]")
    ] = None,
    region: Annotated[
        str | None, typer.Option(help="Region, such as us-east5, or a group such as europe.")
    ] = None,
    tier: Annotated[
        str | None, typer.Option(help="Price tier: on_demand, spot, or your own.")
    ] = None,
    rates: Rates = None,
    json: Json = False,
) -> None:
    """List prices of a chip-hour by region and tier, with their date and source."""
    from ..hardware.tables import PriceListing

    book = _book(rates)
    found = book.find(generation, region=region, tier=tier)
    reason = "" if found else book.why_none(generation, region=region, tier=tier)
    show(PriceListing(found, reason), json=json)


def _book(rates: Path | None) -> "PriceBook":
    from ..hardware.prices import public_prices

    book = public_prices()
    return book if rates is None else book.with_rates(rates)

"""Chips, slices, topologies, number formats, rates and prices: every number with its source."""

from .catalog import Chip as Chip
from .catalog import get_chip as get_chip
from .catalog import list_chips as list_chips
from .detect import Accelerators as Accelerators
from .detect import detect_accelerators as detect_accelerators
from .figure import Figure as Figure
from .formats import NumberFormat as NumberFormat
from .formats import parse_format as parse_format
from .prices import PriceBook as PriceBook
from .prices import Rate as Rate
from .prices import public_prices as public_prices
from .slice import Slice as Slice
from .slice import list_slices as list_slices
from .utilization import mfu_convention as mfu_convention
from .utilization import model_flop_utilization as model_flop_utilization
from .utilization import peak_of_products as peak_of_products

__all__ = [
    "Accelerators",
    "Chip",
    "Figure",
    "NumberFormat",
    "PriceBook",
    "Rate",
    "Slice",
    "detect_accelerators",
    "get_chip",
    "list_chips",
    "list_slices",
    "mfu_convention",
    "model_flop_utilization",
    "parse_format",
    "peak_of_products",
    "public_prices",
]

"""Chips, slices, topologies and prices as data with a source for every number."""

from .catalog import get_chip as get_chip
from .catalog import list_chips as list_chips
from .chip import Chip as Chip
from .figure import Figure as Figure
from .slice import Slice as Slice
from .slice import list_slices as list_slices

"""Modules of PyTorch that people build models from, each to be compared with eager torch."""

from .blocks import blocks
from .comparison import Outcome, compare
from .entry import Entry
from .functions import functions
from .layers import layers
from .losses import losses
from .transformers import transformers

ZOO: tuple[Entry, ...] = (*layers(), *transformers(), *losses(), *blocks(), *functions())

__all__ = ["ZOO", "Entry", "Outcome", "compare"]
